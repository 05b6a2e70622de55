"""Models from the Hugging Face Hub, by id, with errors that say what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from draftsmith.run.errors import UserError

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\S+))?")


def local_directory(place: str | Path, *, revision: str | None = None) -> Path:
    """The folder that a command's argument names: a local one, or a Hub model, downloaded into the Hub's cache.

    Args:
        place: a path, or `OWNER/NAME` or `OWNER/NAME@REVISION`. An existing path wins.
        revision: on the Hub, if `place` names none.

    Raises:
        UserError: it is neither a path nor on the Hub, or cannot be downloaded.
    """
    if Path(place).exists():
        return Path(place)
    found = _ID.fullmatch(str(place))
    if found is None:
        raise UserError(
            f"There is no folder {place} here, and it is not a Hub id such as owner/name or owner/name@revision."
        )
    try:
        return download(found["repo"], revision=found["revision"] or revision)
    except UserError as error:
        raise UserError(f"There is no folder {place} here. {error}") from error


def is_snapshot(directory: Path) -> bool:
    """Whether a folder is a commit in the Hub's cache: complete, and named by its hash."""
    return directory.parent.name == "snapshots"


def download(
    model: str,
    *,
    revision: str | None = None,
    allow: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
) -> Path:
    """A Hub model as a folder in the Hub's own cache. An interrupted download is continued.

    Args:
        model: `owner/name`.
        revision: branch, tag or commit.
        allow: patterns of files to download; all by default.
        ignore: patterns of files not to download.

    Raises:
        UserError: there is no such model or revision, access is denied, or the network fails.
    """
    from huggingface_hub import errors, snapshot_download

    at = f"{model} at revision {revision}" if revision else model
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(allow) if allow else None,
                ignore_patterns=list(ignore) if ignore else None,
            )
        )
    except errors.HFValidationError as error:
        raise UserError(f"`{model}` is not a Hub id: {error} For a directory, write ./{model}.") from None
    except errors.GatedRepoError:
        raise UserError(
            f"The model {at} is gated: ask for access on its page on the Hub, then log in with `hf auth login`."
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise UserError(
            f"There is no model {at} on the Hugging Face Hub that you can see. Check the spelling; a private model "
            f"needs `hf auth login`; for a directory, write ./{model} (in a recipe: relative to it) or its full path."
        ) from None
    except (errors.HTTPError, OSError) as error:  # also HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
        raise UserError(
            f"Could not download the model {at} from the Hugging Face Hub, and it is not in the local cache "
            f"({type(error).__name__}). Check the network and HF_ENDPOINT, or copy the model to this machine and name its "
            "directory instead."
        ) from error
