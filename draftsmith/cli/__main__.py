"""`python -m draftsmith.cli`."""

from draftsmith.cli import main

main()
