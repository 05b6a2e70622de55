"""The formats in which drafters are published, one file each: its layouts, and how to recognize it."""

from draftsmith.convert.formats import deepspec, eagle, eagle3, ibm, medusa, specforge, speculators, vllm, zlab
from draftsmith.convert.formats.base import Format

FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        medusa.FORMAT,
        zlab.FORMAT,
        deepspec.FORMAT,
        vllm.FORMAT,
        eagle.FORMAT,
        eagle3.FORMAT,
        specforge.FORMAT,
        speculators.FORMAT,
        ibm.FORMAT,
    )
}
"""By name, in the order in which a checkpoint is recognized: Medusa's, DFlash's and DSpark's authors give their files the architecture of
vLLM's format. The trainer's own checkpoint (`NATIVE`) is not a published format."""
