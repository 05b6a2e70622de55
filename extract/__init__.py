"""Prompts to store: the target answers, and its hidden states are saved as it does."""
