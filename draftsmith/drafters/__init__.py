"""One file per kind of drafter: its config, its module, its mathematics cited."""
