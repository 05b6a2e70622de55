"""The recipe: one YAML file that describes a whole run. Nothing in `draftsmith.config` imports torch or vLLM.

Sections forbid unknown keys; the error names the nearest known one. Relative paths are relative to the recipe's folder.
`-s section.key=value` overrides any value.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.config.evaluation import EvaluateConfig, ServeConfig, TuneConfig
from draftsmith.config.extraction import ExtractConfig
from draftsmith.config.hardware import Assumptions
from draftsmith.config.methods import NoSpeculation
from draftsmith.config.sampling_options import SamplingOptions
from draftsmith.config.section import Section
from draftsmith.config.target import EngineConfig, TargetConfig
from draftsmith.config.training import TrainConfig


class ConvertConfig(Section):
    """Checkpoint to the directory that vLLM loads."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the drafter's weights. Absent: the target's."""
    quantize: Literal["int8", "fp8", "int8-dynamic"] | None = None
    """8-bit weights in linear layers. `int8` and `fp8` compute in floating point and need a GPU; `int8-dynamic` also rounds the
    layers' inputs and runs on CPUs too. Evaluation measures the effect on acceptance length."""


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder is `runs/NAME`."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of training, of sampled responses, and of the prompts that timing and tuning draw."""
    target: TargetConfig
    engine: EngineConfig = EngineConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    convert: ConvertConfig = ConvertConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tune: TuneConfig = TuneConfig()
    serve: ServeConfig = ServeConfig()
    sampling: SamplingOptions = SamplingOptions()
    plan: Assumptions | None = None

    @model_validator(mode="after")
    def _k_within_the_drafters_limit(self) -> Recipe:
        drafter = self.train.drafter
        most, longest = drafter.max_draft_tokens, max(*self.evaluate.k, self.evaluate.acceptance_k)
        if most is not None and longest > most:
            able = ", ".join(map(str, range(1, most + 1)))
            raise ValueError(
                f"`evaluate` asks for {longest} speculative tokens (`k`, `acceptance_k`), but this drafter drafts at most {most}: set "
                f"`evaluate.k: [{able}]` and `evaluate.acceptance_k: {min(3, most)}`, or train it for more "
                f"(`train.drafter.{drafter.serving.k_field}`)"
            )
        tuned = max(self.tune.k or (0,))
        if most is not None and tuned > most:
            raise ValueError(
                f"`tune.k` asks for {tuned} speculative tokens, but this drafter drafts at most {most}: leave it out, or train the drafter for "
                f"more (`train.drafter.{drafter.serving.k_field}`)"
            )
        return self

    @model_validator(mode="after")
    def _quantized_where_vllm_can(self) -> Recipe:
        drafter = self.train.drafter
        if self.convert.quantize is not None and not drafter.serving.eight_bits:
            raise ValueError(
                f"`convert.quantize: {self.convert.quantize}`: vLLM takes no 8-bit weights of drafters of the kind `{drafter.kind}`; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _states_in_the_targets_dtype(self) -> Recipe:
        kept_in = self.engine.options.get("kv_cache_dtype")
        if kept_in in ("bfloat16", "float16") and kept_in != self.target.dtype:
            raise ValueError(
                f"`engine.options.kv_cache_dtype: {kept_in}` also sets how vLLM keeps hidden states, which are {self.target.dtype} here; "
                "leave it out, or choose an 8-bit type, which vLLM uses for keys and values alone"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_several_machines(self) -> Recipe:
        if self.extract.machines is not None and self.engine.on_ray:
            raise ValueError(
                "`extract.machines` runs whole engines on each machine, and `engine.options.distributed_executor_backend: ray` lets one "
                "engine span several; use the first if the target fits into a machine, else the second"
            )
        return self

    @model_validator(mode="after")
    def _tuned_on_a_suite(self) -> Recipe:
        if self.tune.suite is not None and self.tune.suite not in self.evaluate.suites:
            known = ", ".join(self.evaluate.suites)
            raise ValueError(f"`tune.suite` names `{self.tune.suite}`, which is not a suite; suites: {known}")
        return self

    @model_validator(mode="after")
    def _a_folder_for_each(self) -> Recipe:
        if self.evaluate.output == self.tune.output:
            raise ValueError(
                f"`evaluate.output` and `tune.output` are both `{self.tune.output}`, and each would delete what the other wrote"
            )
        return self

    @field_validator("evaluate")
    @classmethod
    def _suites_exist(cls, value: EvaluateConfig) -> EvaluateConfig:
        for name in value.only or ():
            if name not in value.suites:
                raise ValueError(f"`only` names `{name}`, which is not a suite; suites: {', '.join(value.suites)}")
        for name, method in value.methods.items():
            if isinstance(method, NoSpeculation):
                raise ValueError(f"`methods.{name}` is the baseline, which is always measured")
            if name == "baseline" or name.startswith("K = "):
                raise ValueError(
                    f"`methods.{name}` has a name that results use for what is always measured; choose another"
                )
        return value
