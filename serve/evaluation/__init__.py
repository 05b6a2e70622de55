"""Evaluation: baseline against speculative decoding, measured."""
