"""What a run is planned for: hardware and the lengths of its texts."""

from __future__ import annotations

from pydantic import (
    Field,
)

from draftsmith.config.section import Section
from draftsmith.config.sources import FileSource


class Hardware(Section):
    """What a run is planned for: rates as its maker states them or as measured, and the share of them that work reaches."""

    device: str
    """For people, as in `H100 80GB`."""
    count: int = Field(1, ge=1)
    """Devices that train, a process on each. Extraction has as many as its engines need."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of a device; absent: a CPU, where engines have `engine.kv_cache_gib`, and reading and writing the store take
    the time of the same cores."""
    matmul_tflops: float = Field(gt=0)
    """Products of matrices, in 10^12 FLOP/s a device, in the target's dtype."""
    memory_gb_per_second: float = Field(gt=0)
    """Reading a device's memory, in 10^9 bytes/s."""
    store_mb_per_second: float = Field(gt=0)
    """Plain (uncompressed) states that an extraction checks, compresses and writes, in 10^6 bytes/s a machine."""
    load_mb_per_second: float = Field(gt=0)
    """Plain states that a training process reads, checks and decompresses, in 10^6 bytes/s."""
    prefill_utilization: float = Field(gt=0, le=1)
    """Share of `matmul_tflops` that prefill reaches."""
    decode_utilization: float = Field(gt=0, le=1)
    """Share of `matmul_tflops` or of `memory_gb_per_second`, whichever limits, that decoding reaches."""
    train_utilization: float = Field(gt=0, le=1)
    """Share of `matmul_tflops` that training reaches."""
    start_seconds: float = Field(60, ge=0)
    """Until an engine answers: loading, compiling, warming up."""


class Assumptions(Section):
    """What `draftsmith run --plan` cannot know before it is tried. Nothing else reads it."""

    prompt_tokens: float = Field(ge=1)
    """Mean length of a conversation without the answers that are trained on, chat template included."""
    response_tokens: float = Field(ge=1)
    """Mean length of those answers, all turns of a conversation together."""
    conversations: int | None = Field(None, ge=1)
    """Prompts that there are, where `extract.prompts.limit` does not say it."""
    suite_prompts: int = Field(100, ge=1)
    """Prompts of an evaluation suite, where its `limit` does not say it."""
    machines: int = Field(1, ge=1)
    """What `extract.machines: all` means."""
    target_config: FileSource | None = None
    """A copy of the target's config.json, so that planning needs neither the target nor a network; absent: the target's."""
    hardware: Hardware | None = None
    """Absent: no hours."""
