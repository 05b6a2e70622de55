"""Inference with a drafter: offline evaluation, its report, and a server."""
