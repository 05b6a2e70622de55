"""`serve/record_proposals.py` with slow CPU kernels for weight-only 8-bit quantization, which vLLM supports on GPUs only.

The kernels convert the weights back to floating point and multiply. Everything before them is vLLM's own: reading
`quantization_config`, choosing each layer's scheme, loading and splitting tensors.
"""

import runpy
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F


def add_kernels() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    class Packed(linear.MPLinearKernel):
        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return str(c.weight_type) == "uint8b128" and c.group_size == -1, "8 bits and a scale for each channel"

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            packed, scale, _ = self._get_weight_params(layer)
            numbers = torch.stack([packed >> 8 * place & 255 for place in range(4)], dim=-1).flatten(1) - 128
            layer.whole = numbers.float() * scale.float()

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return F.linear(x, layer.whole.to(x.dtype), bias)

    class Floats(linear.FP8ScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            layer.whole = layer.weight.float().T * layer.weight_scale.float()

        def apply_weights(self, layer: torch.nn.Module, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
            return F.linear(x, layer.whole.to(x.dtype), bias)

        def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
            raise NotImplementedError

    linear._POSSIBLE_KERNELS[PlatformEnum.CPU].append(Packed)
    linear._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(Floats)


if __name__ == "__main__":
    add_kernels()
    runpy.run_path(str(Path(__file__).parents[2] / "serve" / "record_proposals.py"), run_name="__main__")
