"""Draftsmith: train a drafter for your target model and serve both with speculative decoding."""

__version__ = "0.1.0"
