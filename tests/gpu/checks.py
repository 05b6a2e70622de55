"""The checks of `scripts/gpu_check.sh`, by part. Imports nothing but the standard library: a check imports when it runs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

PARTS = {"a": "torch alone", "b": "vLLM too"}


class Missing(Exception):
    """Something that a check needs is not on this machine."""


@dataclass(frozen=True)
class Check:
    """One check: a function `run(cpu)` of a module, which returns figures, raises `Missing`, or fails."""

    part: str
    name: str
    what: str
    function: str
    seconds: int = 300
    """It has failed after so many."""

    def run(self, cpu: bool) -> dict[str, str]:
        """
        Args:
            cpu: do it small, on the CPU.

        Raises:
            Missing: it cannot run here.
            Exception: it failed.
        """
        module, name = self.function.rsplit(".", 1)
        function = getattr(importlib.import_module(f"tests.gpu.{module}"), name)
        figures: dict[str, str] = function(cpu)
        return figures


CHECKS = [
    Check(
        "a", "machine", "what is here: GPU, driver, torch; rates of bf16 products and of copies", "torch_alone.machine"
    ),
    Check("a", "device-tests", "unit tests with their tensors on the device", "torch_alone.device_tests", 560),
    Check("a", "codec", "states from the device, encoded and read back: the same bits", "torch_alone.codec"),
    Check(
        "a",
        "states-copy",
        "states copied out of an engine's cache, in both orders of memory",
        "torch_alone.states_copy",
    ),
    Check(
        "a",
        "attention",
        "flex attention and tiles at an 8B target's shape: the same, and how fast",
        "attention.attention",
    ),
    Check("a", "adamw-8b", "a training step at an 8B target's shape with AdamW", "training_step.adamw", 560),
    Check("a", "muon-8b", "the same with Muon", "training_step.muon", 560),
    Check("a", "start-8b", "the least squares that training starts from, on the device", "training_step.start", 560),
    Check("a", "dspark-8b", "a training step of DSpark's blocks at an 8B target's shape", "training_step.dspark", 560),
    Check("a", "dflash-8b", "the same of DFlash", "training_step.dflash", 560),
    Check("a", "p-eagle-8b", "the same of P-EAGLE", "training_step.p_eagle", 560),
    Check("a", "long-8b", "the same of DSpark on 16k tokens in two documents", "training_step.long", 560),
    Check("b", "imports", "vLLM and what it needs load, for the platform that torch sees", "with_vllm.imports"),
    Check("b", "doctor", "what `draftsmith doctor` finds", "with_vllm.doctor"),
    Check(
        "b",
        "states",
        "extracted states are the target's: eager and with CUDA graphs, generated and prefilled",
        "with_vllm.states",
        1200,
    ),
    Check("b", "drafters", "vLLM proposes what a drafter of each kind proposes", "with_vllm.drafters", 1200),
    Check(
        "b",
        "demo-float32",
        "the demo from nothing; served acceptance is what training predicted",
        "with_vllm.demo_float32",
        3600,
    ),
    Check("b", "demo-bfloat16", "the same in bfloat16", "with_vllm.demo_bfloat16", 3600),
    Check("b", "verify", "vLLM proposes what the trained module proposes", "with_vllm.verify", 900),
    Check("b", "tune", "K for each concurrency, predicted and by wall-clock", "with_vllm.tune", 3600),
    Check("b", "mlp", "an MLP speculator, through the plugin", "with_vllm.mlp", 3600),
    Check("b", "two-gpus", "two engines, and one over three GPUs", "with_vllm.two_gpus", 1800),
    Check("b", "extraction", "what extraction costs the engine", "with_vllm.extraction", 3600),
]
