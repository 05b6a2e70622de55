"""Sections `target` and `engine`: the model, and how vLLM runs it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from draftsmith.config.engine_options import EXECUTOR, refusal
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
    trust_remote_code: bool = False
    """Whether transformers and vLLM may run Python code that comes with the target, for models that they do not have themselves.
    It runs with your rights in every stage: read it first, and pin `revision`."""

    @model_validator(mode="after")
    def _one_origin(self) -> TargetConfig:
        if (self.model is None) == (self.gguf is None):
            raise ValueError("set exactly one of `model` (a Hub id or a directory) and `gguf`")
        return self


class EngineConfig(Section):
    """How vLLM runs the target, in extraction, evaluation, tuning and serving alike."""

    max_model_len: int = Field(2048, ge=16)
    """Longest sequence, prompt and response together, in tokens."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and CUDA graphs. Absent: true on CPUs, where compiling takes minutes and gains
    little, and false on GPUs. A stage's `stage.json` records what it used."""
    kv_cache_gib: float = Field(2.0, gt=0)
    """CPU only: memory for KV caches in GiB, shared by engines that run side by side and by the processes of each. Extraction
    needs room for the sequences of two or three steps, because a finished sequence's blocks are kept until its hidden states are
    written."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """GPU only: share of a GPU's memory for the engines on it."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs that the target is split across; on CPUs, of processes with cores of their own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Any other of vLLM's engine arguments by name, as in `{ kv_cache_dtype: fp8, enable_expert_parallel: true }`, for every engine of
    every stage. Names are checked against the installed vLLM before anything loads. A stage that needs another value says so and
    uses its own. They are part of what results are recorded for: a store or an evaluation made with others is not continued."""

    @property
    def on_ray(self) -> bool:
        """Whether Ray places an engine's processes, on several machines if it needs their GPUs."""
        return self.options.get(EXECUTOR) == "ray"

    @field_validator("options")
    @classmethod
    def _no_other_key_s(cls, options: dict[str, Any]) -> dict[str, Any]:
        if (reason := refusal(options)) is not None:
            raise ValueError(reason)
        return options

    @model_serializer(mode="wrap")
    def _recorded(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if not self.options:
            fields.pop("options", None)  # digests of runs without options are those of before there were any
        return fields
