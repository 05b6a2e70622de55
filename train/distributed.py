"""One training process or several: what DDP, FSDP2 and a process alone do differently.

With DDP every process holds the whole drafter; with FSDP2 each holds a part of every weight, gradient and optimizer
state (`DTensor`s). What is saved is always whole, so that it does not depend on the processes that wrote it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

_OUTLIVING: list[nn.Module] = []
"""Modules that hold a process group, until the interpreter ends. Freed right after training, gloo's group waits for its
thread with Python's lock held, and that thread may be waiting for the lock to free the tensor of its last work (torch 2.13)."""


def prepare(accelerator: Accelerator, module: nn.Module, *, shard: bool) -> nn.Module:
    """`module` as each process runs it, its gradients averaged over all of them; the weights are those of the main one.

    Sharded, its parameters are other objects than before. A drafter is sharded as one unit: it is a layer or two, and its
    chain calls their parts, where FSDP2 gathers weights only when whole modules are called. (accelerate prepares
    FSDP2 on GPUs alone, hence the call of torch's own, which has no more to it.)
    """
    if accelerator.num_processes == 1:
        return module
    for parameter in module.parameters():
        torch.distributed.broadcast(parameter.data, src=0)
    _OUTLIVING.append(module)
    if shard or accelerator.distributed_type == DistributedType.FSDP:  # `accelerate launch --use_fsdp` asks for it too
        fully_shard(module, mesh=init_device_mesh(accelerator.device.type, (accelerator.num_processes,)))
        return module
    with warnings.catch_warnings():  # torch 2.13 has another name for an option that accelerate gives by the old one
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        prepared: nn.Module = accelerator.prepare_model(module)
    _OUTLIVING.append(prepared)
    return prepared


@contextmanager
def no_grad_sync(module: nn.Module) -> Iterator[None]:
    """Each process adds to its own gradients: the next backward pass outside brings all of them together."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    elif isinstance(module, nn.parallel.DistributedDataParallel):
        with module.no_sync():
            yield
    else:
        yield


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """The module's parameters are whole and can be read, on every process; all must enter."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def gather(tensors: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """The whole tensors, on the CPU, one after the other; other values as they are. All processes must call it.

    Args:
        keep: return them; other processes only help, and get an empty dict.
    """
    gathered = {}
    for name, value in tensors.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            gathered[name] = whole.detach().cpu() if isinstance(whole, torch.Tensor) else whole
    return gathered


def shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that all have, as `parameter` is split; all of it where that is not."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)


def gather_optimizer(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[int, dict[str, Any]]:
    """The optimizer's state of each parameter, whole; see `gather`. Learning rates are the recipe's and not part of it."""
    return {index: gather(state, keep=keep) for index, state in optimizer.state_dict()["state"].items()}


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Load what `gather_optimizer` gave, split as the parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            name: shard_like(value, parameters[index]) if value.shape == parameters[index].shape else value
            for name, value in values.items()
        }
        for index, values in saved.items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
