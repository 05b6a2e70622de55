"""The target: where it comes from, what identifies it, its family's facts, its weights and reference hidden states."""
