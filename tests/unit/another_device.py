"""A device that is not the CPU, on a machine that has none: tensors that say they are on a GPU, and compute on the CPU.

What a GPU refuses is refused: a product of tensors of two devices, or an index of another device than what it indexes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda:0")


class OnGpu(torch.Tensor):
    """Says that it is on `GPU`; its numbers are `on_cpu`."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> "OnGpu":
        made = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(), dtype=on_cpu.dtype, device=GPU
        )  # fmt: skip
        made.on_cpu = on_cpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


@contextmanager
def with_gpu() -> Iterator[None]:
    """Tensors can be made on `GPU` and moved to it. No gradients: torch's engine for them asks the device itself."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=GPU) is then a move, too
    try:
        with mock.patch.object(torch.cuda, "_lazy_init"), _Made(), torch.no_grad():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Made(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def on_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters and buffers there. (`Module.to` cannot make tensors of another class.)"""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and not isinstance(value, OnGpu):
                part._parameters[name] = torch.nn.Parameter(OnGpu(value.detach().clone()), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, OnGpu):
                part._buffers[name] = OnGpu(buffer.clone())
    return module


_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXES = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def of_cpu(values: Any) -> bool:
        tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
        return any(not isinstance(value, OnGpu) and value.dim() > 0 for value in tensors)

    there = any(isinstance(value, OnGpu) for value in tree_leaves((args, kwargs)))
    if func in _INDEXES and isinstance(args[0], OnGpu):
        mixed = of_cpu(args[2:])  # the indices may be on the CPU
    else:
        mixed = func not in _MOVES and of_cpu((args, kwargs))
    if there and mixed:
        raise RuntimeError(f"{func}: tensors on the CPU and on a GPU")
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == GPU.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    real_args, real_kwargs = tree_map(lambda value: value.on_cpu if isinstance(value, OnGpu) else value, (args, kwargs))
    done = func(*real_args, **real_kwargs)
    if func._schema.is_mutable and func._schema.name.endswith("_"):  # in place
        return args[0]
    return tree_map(lambda value: OnGpu(value) if there and isinstance(value, torch.Tensor) else value, done)
