"""Sections `target` and `engine`: the model, and how vLLM runs it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from draftsmith.config.section import ModelName, Section
from draftsmith.config.sources import FileSource


class TargetConfig(Section):
    """The model to speed up: a Hub id, a local directory or a GGUF file."""

    model: ModelName | None = None
    """A Hugging Face Hub id (`owner/name`), or a local model directory whose path begins with `.`, `~` or `/`."""
    revision: str | None = None
    """Revision on the Hub. Only with a Hub id."""
    gguf: FileSource | None = None
    """A GGUF file, instead of `model`. It is converted once to a Hugging Face directory in the cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type that the target computes in and the store holds. Use float32 for exact comparisons, and on CPUs without
    bfloat16 arithmetic."""

    @model_validator(mode="after")
    def _one_origin(self) -> TargetConfig:
        if (self.model is None) == (self.gguf is None):
            raise ValueError("set exactly one of `model` (a Hub id or a directory) and `gguf`")
        return self


class EngineConfig(Section):
    """How vLLM runs the target, in extraction and in evaluation alike."""

    max_model_len: int = Field(2048, ge=16)
    """Longest sequence, prompt and response together, in tokens."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and CUDA graphs. Absent: true on CPUs, where compiling takes minutes and gains
    little, and false on GPUs. A stage's `stage.json` records what it used."""
    kv_cache_gib: float = Field(2.0, gt=0)
    """CPU only: memory for KV caches in GiB, shared by engines that run side by side. Extraction needs room for the sequences of
    two or three steps, because a finished sequence's blocks are kept until its hidden states are written."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """GPU only: share of a GPU's memory for the engines on it."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs that the target is split across."""
