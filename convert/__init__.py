"""Checkpoint to and from published formats."""
