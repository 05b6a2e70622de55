"""The differences between one training process, DDP and FSDP2.

With DDP every process holds the whole drafter; with FSDP2 each holds a shard of every weight, gradient and optimizer
state (`DTensor`s). Snapshots and checkpoints hold unsharded tensors, so they do not depend on the number of processes.
"""

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

_KEPT_ALIVE: list[nn.Module] = []
"""Modules that hold a process group, until the interpreter ends. Freed right after training, gloo's group waits for its
thread while holding the GIL, and that thread may need the GIL to free the tensor of its last work (torch 2.13)."""


def prepare(accelerator: Accelerator, module: nn.Module, *, shard: bool) -> nn.Module:
    """`module` as each process runs it: gradients are averaged over all processes, and all start with the main one's weights.

    With `shard`, FSDP2 instead of DDP: the parameters are replaced by new objects. A drafter is sharded as one unit: it has a layer
    or two, and its chain calls their submodules, while FSDP2 gathers weights only when a sharded module itself is called.
    (accelerate prepares FSDP2 on GPUs only, hence the direct call of torch.)
    """
    if accelerator.num_processes == 1:
        return module
    for parameter in module.parameters():
        torch.distributed.broadcast(parameter.data, src=0)
    _KEPT_ALIVE.append(module)
    if shard or accelerator.distributed_type == DistributedType.FSDP:  # `accelerate launch --use_fsdp` asks for it too
        fully_shard(module, mesh=init_device_mesh(accelerator.device.type, (accelerator.num_processes,)))
        return module
    with warnings.catch_warnings():  # accelerate uses an option's name from before torch 2.13
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        prepared: nn.Module = accelerator.prepare_model(module)
    _KEPT_ALIVE.append(prepared)
    return prepared


@contextmanager
def no_grad_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally; the next backward pass outside the context averages them over the processes."""
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
    """Gather the module's parameters for reading, on every process; all processes must enter."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def gather(tensors: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Gather sharded tensors onto the CPU, one after the other; other values stay as they are. All processes must call it; those
    that do not `keep` the result get an empty dict."""
    gathered = {}
    for name, value in tensors.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            gathered[name] = whole.detach().cpu() if isinstance(whole, torch.Tensor) else whole
    return gathered


def shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This process's shard of a tensor that all processes have, sharded like `parameter`; the tensor where that is not sharded."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)


def gather_optimizer(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[int, dict[str, Any]]:
    """The optimizer's state by parameter, unsharded; see `gather`. Learning rates come from the recipe and are left out."""
    return {index: gather(state, keep=keep) for index, state in optimizer.state_dict()["state"].items()}


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Load the state that `gather_optimizer` returned, sharded like the parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            name: shard_like(value, parameters[index]) if value.shape == parameters[index].shape else value
            for name, value in values.items()
        }
        for index, values in saved.items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
