"""Store to checkpoint: packing and loading, losses, the loop, acceptance prediction."""
