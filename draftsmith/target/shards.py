"""Which file of a Hugging Face directory holds which of the target's tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path

from draftsmith.run.errors import UserError

FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of weights in one file, in the order in which vLLM looks for them; sharded ones have an index, `NAME.index.json`."""
_IN_A_LAYER = re.compile(r"\.\d+\.")
"""In a tensor's name: the number of a decoder layer, an expert, or a layer of another model beside the language model."""


def shards(path: Path, whole: str) -> dict[str, str] | None:
    """File name by tensor name, from the index of a sharded checkpoint, whose shards need not be there; None without an index.

    Args:
        whole: of `FILES`.

    Raises:
        UserError: the index is not one.
    """
    index = path / f"{whole}.index.json"
    if not index.is_file():
        return None
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        good = all(isinstance(file, str) and Path(file).name == file for file in places.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise UserError(
            f"{index} does not map tensors to files beside it (`weight_map`). Download or save the model again."
        )
    return dict(places)


def shared_files(path: Path, whole: str) -> list[str]:
    """The files with embedding, head and final norm: those of all tensors that are in no numbered layer.

    Only the index has to be there. A checkpoint in one file is needed whole.

    Raises:
        UserError: the index is not one.
    """
    places = shards(path, whole)
    if places is None:
        return [whole]
    return sorted({file for name, file in places.items() if not _IN_A_LAYER.search(name)})


def missing_shards(path: Path) -> list[str]:
    """Names of the shards that the index names and that are not there.

    Raises:
        UserError: the index is not one.
    """
    there = (whole for whole in FILES if (path / whole).is_file() or shards(path, whole) is not None)
    places = shards(path, next(there, FILES[0])) or {}
    return sorted({file for file in places.values() if not (path / file).is_file()})


def require_all_shards(path: Path) -> None:
    """
    Raises:
        UserError: a shard that the index names is missing, or the index is not one.
    """
    missing = missing_shards(path)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"The target in {path} is incomplete: {', '.join(missing[:3])}{more} of its shards are missing. Engines need all of "
            "them; only training and conversion do with those of embedding, head and final norm. Download or copy the rest."
        )
