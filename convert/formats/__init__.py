"""The formats that drafters are published in, one file each: a table of names, and by what a checkpoint is recognized."""

from __future__ import annotations

from draftsmith.convert.formats import eagle, eagle3, ibm, medusa, specforge, speculators, vllm
from draftsmith.convert.formats.base import Format

FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        vllm.FORMAT, eagle.FORMAT, eagle3.FORMAT, specforge.FORMAT, speculators.FORMAT, ibm.FORMAT, medusa.FORMAT,
    )
}  # fmt: skip
"""By name, without the trainer's own checkpoint, which is no published format."""
