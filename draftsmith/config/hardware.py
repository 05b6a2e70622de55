"""The `plan` section: what `draftsmith run --plan` assumes about hardware and text lengths."""

from typing import Any

from pydantic import Field, model_validator

from draftsmith.config.section import Section
from draftsmith.config.sources import FileSource

PRESETS: dict[str, dict[str, Any]] = {
    # Rates measured in float32 by the demo (docs/log.md): 570 tokens/s in prefill, 364 tokens/s decoded for 128 sequences, 60 ms
    # for a decoding step of one sequence. vLLM is imported for the first engine alone.
    "cpu-2-cores": {
        "device": "machine with two CPU cores", "matmul_tflops": 0.2, "memory_gb_per_second": 18, "store_mb_per_second": 270,
        "load_mb_per_second": 640, "prefill_utilization": 0.75, "decode_utilization": 0.5, "train_utilization": 0.7,
        "start_seconds": 25, "later_start_seconds": 3,
    },
    # The same with bfloat16 arithmetic, as measured by recipes/smollm2-eagle3.yaml beside other work.
    "cpu-2-cores-bf16": {
        "device": "machine with two CPU cores", "matmul_tflops": 0.7, "memory_gb_per_second": 18, "store_mb_per_second": 270,
        "load_mb_per_second": 640, "prefill_utilization": 0.75, "decode_utilization": 0.35, "train_utilization": 0.42,
        "start_seconds": 25, "later_start_seconds": 3, "bfloat16": True,
    },
    # An H100 SXM by NVIDIA's figures. Training reached 0.29 to 0.41 on an H200, which computes alike; the other utilizations are guesses,
    # the store's rates those of one CPU core (docs/log.md).
    "h100-80gb": {
        "device": "H100 80GB", "memory_gib": 79, "matmul_tflops": 989, "memory_gb_per_second": 3350, "store_mb_per_second": 270,
        "load_mb_per_second": 640, "prefill_utilization": 0.5, "decode_utilization": 0.5, "train_utilization": 0.4,
        "start_seconds": 120,
    },
}  # fmt: skip
"""Hardware by name; keys beside `preset` override a preset's values."""


class Hardware(Section):
    """The hardware that a run is planned for: peak or measured rates, and the share of them that the work reaches.

    Also accepts the name of a preset: `hardware: h100-80gb` means `hardware: { preset: h100-80gb }`.
    """

    preset: str | None = Field(None, exclude=True)
    """Preset that supplies the keys that are not given: `cpu-2-cores`, `cpu-2-cores-bf16` or `h100-80gb`."""
    device: str
    """Name of the device, such as `H100 80GB`, for display."""
    count: int = Field(1, ge=1)
    """Number of devices for training, one process on each. Extraction uses as many as its engines need."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of a device in GiB. Absent: a CPU, on which engines have `engine.kv_cache_gib`, and reading and writing the
    store uses the same cores as the rest."""
    bfloat16: bool | None = None
    """Whether it has arithmetic for bfloat16, in which training then computes. Absent: a GPU has."""
    matmul_tflops: float = Field(gt=0)
    """Rate of matrix products per device, in 10^12 FLOP/s: in half precision, or in float32 on a CPU without arithmetic for bfloat16."""
    memory_gb_per_second: float = Field(gt=0)
    """Memory bandwidth of a device, in 10^9 bytes/s."""
    store_mb_per_second: float = Field(gt=0)
    """Rate at which a machine checks, compresses and writes hidden states, in 10^6 uncompressed bytes/s."""
    load_mb_per_second: float = Field(gt=0)
    """Rate at which a training process reads, checks and decompresses hidden states, in 10^6 uncompressed bytes/s."""
    prefill_utilization: float = Field(gt=0, le=1)
    """Share of `matmul_tflops` that prefill reaches."""
    decode_utilization: float = Field(gt=0, le=1)
    """Share that decoding reaches of `matmul_tflops` or `memory_gb_per_second`, whichever limits it."""
    train_utilization: float = Field(gt=0, le=1)
    """Share of `matmul_tflops` that training reaches."""
    start_seconds: float = Field(60, ge=0)
    """Time until an engine is ready (importing vLLM, loading, compiling, warming up), in seconds."""
    later_start_seconds: float | None = Field(None, ge=0)
    """The same for a stage's engines after its first, which on CPUs find vLLM imported. Absent: `start_seconds`."""

    @property
    def native_bfloat16(self) -> bool:
        """`bfloat16`, or what is usual."""
        return self.memory_gib is not None if self.bfloat16 is None else self.bfloat16

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, section: Any) -> Any:
        if isinstance(section, str):
            section = {"preset": section}
        if not isinstance(section, dict) or section.get("preset") is None:
            return section
        if (name := section["preset"]) not in PRESETS:
            raise ValueError(f"there is no preset `{name}`; presets: {', '.join(PRESETS)}")
        return PRESETS[name] | section


class Assumptions(Section):
    """What `draftsmith run --plan` assumes because it cannot be known before the run. Only `--plan` and `tune` read it."""

    prompt_tokens: float = Field(ge=1)
    """Mean length of a conversation without the responses that are trained on, chat template included, in tokens."""
    response_tokens: float = Field(ge=1)
    """Mean length of these responses, all turns of a conversation together, in tokens."""
    conversations: int | None = Field(None, ge=1)
    """Number of prompts, but no more than `extract.prompts.limit` and the rows of a local file of JSON lines. Absent: as many as these
    say."""
    suite_prompts: int = Field(100, ge=1)
    """Number of prompts of an evaluation suite, or held out, if neither a `limit` nor a local file of JSON lines says it."""
    machines: int = Field(1, ge=1)
    """Number of machines that `extract.machines: all` stands for."""
    target_config: FileSource | None = None
    """A copy of the target's config.json, so that planning needs neither the target nor a network. Absent: the target's."""
    hardware: Hardware | None = None
    """The hardware, or the name of a preset. Absent: no hours are estimated."""
