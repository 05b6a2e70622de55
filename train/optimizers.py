"""What changes the weights: the optimizers, their learning rates, and the moving average of the result."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from draftsmith.config.recipe import TrainConfig
from draftsmith.drafters.base import Drafter
from draftsmith.train.muon import Muon


def make_optimizers(options: TrainConfig, drafter: Drafter) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the network; AdamW for norms, heads and embeddings, as Jordan advises (see `muon.py`). Of
    `options`, `precision` is set; parameters that do not require a gradient are left out."""
    by_token = {id(p) for p in (*drafter.head_parameters(), *drafter.embedding_parameters())}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for p in drafter.parameters():
        if p.requires_grad:
            (matrices if options.optimizer == "muon" and p.ndim == 2 and id(p) not in by_token else rest).append(p)
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay))
    if matrices:
        dtype = torch.bfloat16 if options.precision == "bfloat16" else torch.float32
        optimizers.append(Muon(matrices, lr=options.muon_lr, weight_decay=options.weight_decay, dtype=dtype))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every parameter group to `factor` times its peak learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def learning_rate_factor(step: int, total: int, warmup: float, schedule: str = "cosine") -> float:
    """Linear warm-up over the first `warmup` share of the steps, then `train.lr_schedule`; in (0, 1]."""
    warmup_steps = max(1, round(total * warmup))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total - warmup_steps)
    return {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}[schedule]


class MovingAverage:
    """Exponential moving average of the trained weights of a module, which is sharded already where it will be. `decay` is the share of
    the old average that a step keeps, less in the first steps; None averages nothing."""

    def __init__(self, module: nn.Module, decay: float | None) -> None:
        self._module, self._decay = module, decay
        self.weights: dict[str, torch.Tensor] = {}  # by parameter name; empty where nothing is averaged
        if decay is not None:
            self.weights = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step number `step`, counted from 0."""
        if self._decay is None:
            return
        decay = min(self._decay, (step + 1) / (step + 10))
        for name, parameter in self._averaged_parameters():
            self.weights[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module holds the averaged weights inside the context, and its own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._averaged_parameters():
            current = parameter.clone()
            parameter.copy_(self.weights[name])
            self.weights[name].copy_(current)

    def _averaged_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self._module.named_parameters() if name in self.weights)
