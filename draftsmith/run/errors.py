"""The errors that a user meets: one paragraph saying what is wrong, where, and what to do.

Imports nothing, so that a recipe can be checked on a machine without torch.
"""


class DraftsmithError(Exception):
    """Something failed that is not the user's doing. The command line exits with status 1."""

    exit_status = 1


class UserError(DraftsmithError):
    """The input is wrong and the user can mend it. The command line exits with status 2."""

    exit_status = 2


class Stopped(DraftsmithError):
    """A signal asked to stop, and what was done is saved. The command line exits as shells report that signal."""

    exit_status = 143  # 128 + SIGTERM
