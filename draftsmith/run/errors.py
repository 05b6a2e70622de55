"""Errors for users: one paragraph that says what is wrong, where, and what to do.

Imports nothing, so that a recipe can be checked on a machine without torch.
"""


class DraftsmithError(Exception):
    """A failure that is not the user's mistake. The command line exits with status 1."""

    exit_status = 1


class UserError(DraftsmithError):
    """Wrong input, which the user can correct. The command line exits with status 2."""

    exit_status = 2


class Stopped(DraftsmithError):
    """A signal asked to stop, and progress is saved. The command line exits with the status that shells give that signal."""

    exit_status = 143  # 128 + SIGTERM
