"""What the tests need of vLLM's processes beside Triton: a note of each model runner, and a kernel that GPUs have.

vLLM's modules are changed as they are imported, so that nothing is imported that vLLM would not import itself.
"""

import json
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import wrapt

NOTES = "VLLM_AS_ON_GPUS_NOTES"
"""Environment variable: the folder where every model runner is noted, in a file of its own."""


def register() -> None:
    wrapt.register_post_import_hook(_note_runners, "vllm.v1.worker.cpu_model_runner")
    wrapt.register_post_import_hook(_note_runners, "vllm.v1.worker.cpu.model_runner")
    wrapt.register_post_import_hook(_norms_as_on_gpus, "vllm.v1.worker.cpu.model_runner")


def _note_runners(module: ModuleType) -> None:
    """Of each runner that this process makes: its class's module, and its speculator's class."""
    runner = module.CPUModelRunner
    begin = runner.__init__

    def note(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        if NOTES in os.environ:
            speculator = getattr(self, "speculator", None)
            found = {"runner": type(self).__module__, "speculator": speculator and type(speculator).__name__}
            descriptor, path = tempfile.mkstemp(dir=os.environ[NOTES])
            with open(descriptor, "w") as file:
                json.dump(found, file)
            os.replace(path, f"{path}.json")

    runner.__init__ = note


def notes(folder: Path) -> dict[str, dict[str, Any]]:
    """By file name, the notes in a folder."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


def _norms_as_on_gpus(module: ModuleType) -> None:
    """In eager mode vLLM's kernel on GPUs adds and norms in place (`vllm/kernels/vllm_c.py`); what the CPU build takes does not.

    Workers set the implementations that they take before they make their runner, and this module is imported in between.
    """
    from vllm import ir

    op = ir.ops.fused_add_rms_norm
    if "in_place" not in op.impls:
        native = op.impls["native"].impl_fn

        def in_place(
            x: torch.Tensor,
            x_residual: torch.Tensor,
            weight: torch.Tensor | None,
            epsilon: float,
            variance_size: int | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            normed, added = native(x, x_residual, weight, epsilon, variance_size)
            return x.copy_(normed), x_residual.copy_(added)

        op.register_impl("in_place", inplace=True)(in_place)
    op.set_default(["in_place", "native"])
