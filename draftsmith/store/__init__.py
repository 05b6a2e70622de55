"""The hidden-state store: what extraction writes and training reads."""
