"""Hidden states as one safetensors file a sequence, as vLLM's `ExampleHiddenStatesConnector` writes and speculators reads them.

With M tokens, L saved layers and H the target's hidden size:

    token_ids      int64 [M]        the tokens that were inputs of the target
    hidden_states  dtype [M, L, H]  their states

The rest of what a store knows of the sequence is in the file's metadata, which other programs ignore: `draftsmith` is a JSON
object (`identity`, `sample_id`, `held_out`, `loss_mask` as pairs [start, end), `next_token_id`, and with images `images`, their
digests), and `draftsmith_checksum` the XXH3-64 of the file with zeros in place of its own digits. Files of other programs have neither.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import xxhash

from draftsmith.run.atomic_io import write_bytes
from draftsmith.run.safetensors_io import header_bytes, parse_header
from draftsmith.store.format import Sequence, StoreIdentity

_ABOUT, _CHECKSUM = "draftsmith", "draftsmith_checksum"
_DIGITS = b'"%s":"' % _CHECKSUM.encode()
"""What comes before the checksum's digits. In `_ABOUT` quotes are escaped, so it occurs nowhere before."""
_NO_CHECKSUM = b"0" * 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StatesFile(NamedTuple):
    """A file's content."""

    token_ids: torch.Tensor
    """int64 or int32 [M]"""
    hidden_states: torch.Tensor
    """[M, L, H]"""
    about: dict[str, Any] | None
    """The metadata that only our own files have, with `loss_mask` as a bool tensor that covers `next_token_id`, too, and `images` as in
    `Sequence`."""


def write_states_file(path: Path, sequence: Sequence, identity: StoreIdentity) -> None:
    """Write a sequence of a store atomically.

    Raises:
        DraftsmithError: the disk is full.
    """
    states = sequence.hidden_states.contiguous()
    count = len(states)
    token_ids = sequence.token_ids[:count].long()
    about = {
        "identity": identity.recorded(),
        "sample_id": sequence.sample_id,
        "held_out": sequence.held_out,
        "loss_mask": _spans(sequence.loss_mask),
        "next_token_id": int(sequence.token_ids[-1]) if len(sequence.token_ids) > count else None,
        **({"images": sequence.images} if sequence.images else {}),
    }
    layout = {"token_ids": (torch.int64, [count]), "hidden_states": (states.dtype, list(states.shape))}
    header = header_bytes(layout, metadata={_ABOUT: json.dumps(about), _CHECKSUM: _NO_CHECKSUM.decode()})
    data = [tensor.view(-1).view(torch.uint8).numpy().data for tensor in (token_ids, states)]
    before, _, after = header.partition(_DIGITS + _NO_CHECKSUM)
    hashed = xxhash.xxh3_64(header)
    for part in data:
        hashed.update(part)
    write_bytes(path, before + _DIGITS + hashed.hexdigest().encode() + after, *data)


def read_states_file(path: Path) -> StatesFile:
    """Read a file of our own or of another program, all of it, and check what can be checked of it alone.

    Raises:
        ValueError: it is not such a file, or is not as it was written.
    """
    try:
        data = path.read_bytes()
        tensors = safetensors.torch.load(data)
        metadata = parse_header(data).metadata
    except Exception as error:  # the library raises many kinds
        raise ValueError(f"it is not a safetensors file ({error})") from None
    about = None
    if _ABOUT in metadata or _CHECKSUM in metadata:
        about = _checked(data, metadata)
    if missing := {"token_ids", "hidden_states"} - tensors.keys():
        raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
    token_ids, states = tensors["token_ids"], tensors["hidden_states"]
    if token_ids.dtype not in (torch.int64, torch.int32) or token_ids.dim() != 1:
        raise ValueError(f"token_ids are {_described(token_ids)}, expected integers [tokens]")
    if states.dtype not in _DTYPES or states.dim() != 3 or not states.numel():
        raise ValueError(f"hidden_states are {_described(states)}, expected floats [tokens, layers, hidden size]")
    if len(token_ids) != len(states):
        raise ValueError(f"{len(token_ids)} tokens and {len(states)} states do not go together")
    return StatesFile(token_ids, states, about)


def _checked(data: bytes, metadata: dict[str, str]) -> dict[str, Any]:
    """Our own metadata, the checksum compared.

    Raises:
        ValueError: the file is not as it was written.
    """
    view, start = memoryview(data), data.find(_DIGITS) + len(_DIGITS)
    hashed = xxhash.xxh3_64(view[:start])
    hashed.update(_NO_CHECKSUM)
    hashed.update(view[start + len(_NO_CHECKSUM) :])
    if hashed.hexdigest() != metadata.get(_CHECKSUM):
        raise ValueError("it is damaged: its checksum differs")
    about: dict[str, Any] = json.loads(metadata[_ABOUT])
    length = parse_header(data).tensors["token_ids"].shape[0] + (about["next_token_id"] is not None)
    mask = torch.zeros(length, dtype=torch.bool)
    for first, last in about["loss_mask"]:
        mask[first:last] = True
    return about | {"loss_mask": mask, "images": tuple(about.get("images", ()))}


def _spans(mask: torch.Tensor) -> list[tuple[int, int]]:
    """Where a bool tensor is True, as pairs [start, end)."""
    edge = torch.zeros(1, dtype=torch.int8)
    edges = torch.diff(mask.to(torch.int8), prepend=edge, append=edge).nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
