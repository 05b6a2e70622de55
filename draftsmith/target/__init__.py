"""The target: where it comes from, what identifies it, its weights and reference hidden states."""
