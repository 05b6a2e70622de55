"""Prompts and conversations: reading, drawing, splitting and rendering them, for extraction and evaluation."""
