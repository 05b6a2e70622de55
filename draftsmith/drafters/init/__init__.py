"""Initialization of drafters from the target and its hidden states."""
