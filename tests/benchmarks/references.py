"""Each kind's own published recipe, in one plain loop: what ours is held against on the same tokens.

The modules are ours (their mathematics is tested against the papers), the rest is written here from the papers and the
reference implementations, and shares nothing with our trainer but the packed layout of a batch:

EAGLE (SafeAILab/EAGLE, `train/main.py`): random start; one step, no chain; SmoothL1 between states, 1.0, plus soft
    cross-entropy over the whole vocabulary, 0.1; uniform noise 0.2 on the states (in the module); AdamW 3e-5, betas (0.9,
    0.95), gradients clipped by value at 0.5. Its warm-up of 2,000 steps is longer than all of our training: there is none.
    It reads the target's last state, and so do the two others: there are no states to choose.
MLP speculator (foundation-model-stack/fms-fsdp, `speculator/train_speculator_utils.py`): weights N(0, 1/D); sum of the
    steps' cross-entropies on tokens; AdamW 1e-3, betas (0.9, 0.95), weight decay 0.1, clip 1.0; parabolic warm-up, cosine
    to a tenth.
Medusa-1 (FasterDecoding/Medusa, `medusa/train/train_legacy.py`): blocks at the identity, heads copied from the target's;
    sum of the heads' cross-entropies on tokens; AdamW 1e-3, no decay, clip 1.0; warm-up over a tenth, cosine to zero; autocast
    to bfloat16 (`scripts/train_vicuna_7b.sh`), here where the processor multiplies it: an epoch takes half as long.

Their batches were tens of thousands of tokens and more, of billions. On a store of 100k tokens that would be a few
steps, so here all take `TOKENS_PER_STEP`, which is the best for them. For the same reason their learning rates and numbers of
epochs are not right here: `Reference.lr` is where a sweep begins (`bench_learn.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.medusa import MedusaDrafter
from draftsmith.run.cuda import native_bfloat16
from draftsmith.run.progress import Bar
from draftsmith.store.reader import Store
from draftsmith.target.tensors import TargetTensors
from draftsmith.train.packing import pack

TOKENS_PER_STEP = 1024


@dataclass(frozen=True)
class Reference:
    """A published recipe. The loss is a function of a drafter, a batch and the target's normed last states [T, H]."""

    loss: Callable[[Drafter, Batch, torch.Tensor, torch.Tensor], torch.Tensor]
    lr: float
    """As published."""
    schedule: Callable[[float], float]
    """Share of the run that is done to the factor of the learning rate."""
    clip: Callable[[list[torch.nn.Parameter]], object]
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    autocast: bool = False
    """Whether forward and loss run under autocast to bfloat16, where the processor multiplies it."""

    @property
    def in_bfloat16(self) -> bool:
        """Whether they do here."""
        return self.autocast and native_bfloat16()


def eagle_loss(drafter: Drafter, batch: Batch, normed: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Regression on the next normed state, and a tenth of the cross-entropy against the distribution it gives."""
    rows = batch.loss_weights[:, 0].nonzero()[:, 0]
    (step,) = drafter.chain(batch, steps=1)
    with torch.no_grad():
        wanted = normed[rows + 1]
        distribution = F.linear(wanted, head).softmax(-1)
    regression = F.smooth_l1_loss(step.normed, wanted)
    return regression + 0.1 * F.cross_entropy(F.linear(step.normed, head), distribution)


def token_loss(drafter: Drafter, batch: Batch, normed: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Sum over the steps of the mean cross-entropy on the tokens that the target wrote."""
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    total = normed.new_zeros(())
    for k, step in enumerate(drafter.chain(batch, steps=batch.loss_weights.shape[1])):
        counted = step.loss_weights > 0
        logits = F.linear(step.normed[counted], step.head)
        total = total + F.cross_entropy(logits, batch.next_tokens[rows[counted], k + 1])
    return total


def _clip_norm(parameters: list[torch.nn.Parameter]) -> object:
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def _clip_value(parameters: list[torch.nn.Parameter]) -> object:
    return torch.nn.utils.clip_grad_value_(parameters, 0.5)


def constant(done: float) -> float:
    """EAGLE's, after its warm-up."""
    return 1.0


def parabola_then_cosine(done: float) -> float:
    """fms-fsdp's: up along 1 - (1 - x)^2 over the first 5%, then down to a tenth."""
    if done < 0.05:
        return 1 - (1 - done / 0.05) ** 2
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))


def ramp_then_cosine(done: float) -> float:
    """Transformers' cosine schedule, with a tenth of the run to warm up, as Medusa's launch script sets it."""
    return done / 0.1 if done < 0.1 else 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9))


REFERENCES = {
    "eagle": Reference(eagle_loss, 3e-5, constant, _clip_value),
    "mlp_speculator": Reference(token_loss, 1e-3, parabola_then_cosine, _clip_norm, weight_decay=0.1),
    "medusa": Reference(
        token_loss, 1e-3, ramp_then_cosine, _clip_norm, betas=(0.9, 0.999), weight_decay=0.0, autocast=True
    ),
}


def made_from(kind: str) -> list[object]:
    """What a training comes from beside the drafter, its text and its settings: the kind's own recipe, and the loop that all share."""
    recipe = REFERENCES[kind]
    functions = (recipe.loss, recipe.schedule, recipe.clip, start_as_published, train_reference, _shuffled)
    sources = [inspect.getsource(one) for one in functions]
    return [sources, recipe.betas, recipe.weight_decay, recipe.in_bfloat16, TOKENS_PER_STEP]


def start_as_published(drafter: Drafter, tensors: TargetTensors) -> None:
    """In place. EAGLE's layers and the MLP speculator are made with their published random start."""
    if isinstance(drafter, MedusaDrafter):
        for parameter in drafter.blocks.parameters():
            torch.nn.init.zeros_(parameter)
        for head in drafter.head_parameters():
            head.data.copy_(tensors.lm_head)


def train_reference(
    kind: str,
    drafter: Drafter,
    tensors: TargetTensors,
    store: Store,
    last_column: int,
    *,
    epochs: int,
    steps: int,
    lr: float,
) -> Iterator[int]:
    """Train a fresh module in place on the store's training part; yields after each epoch how many are done.

    Args:
        drafter: reads the target's last state alone.
        last_column: where that is among the store's states.
        epochs: of the whole training, which the schedule of the learning rate goes by.
        steps: tokens ahead that it learns; EAGLE's recipe learns the first alone.
        lr: peak learning rate.
    """
    recipe = REFERENCES[kind]
    torch.manual_seed(0)
    start_as_published(drafter, tensors)
    head, norm = tensors.lm_head.float(), tensors.final_norm_weight.float()
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
    plan = [(epoch, group) for epoch in range(1, epochs + 1) for group in _shuffled(store)]
    last_steps = {epoch: number for number, (epoch, _) in enumerate(plan)}
    drafter.train()
    with Bar(f"{kind} as published, lr {lr:g}, {epochs} epochs", total=len(plan), unit="steps") as bar:
        for number, (epoch, rows) in enumerate(plan):
            batch = pack(store.read(rows), steps=steps).with_layers([last_column])
            batch = replace(batch, hidden_states=batch.hidden_states.float())
            normed = F.rms_norm(batch.hidden_states[:, 0], norm.shape, norm, drafter.config.rms_norm_eps)
            for group in optimizer.param_groups:
                group["lr"] = lr * recipe.schedule((number + 1) / len(plan))
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.in_bfloat16):
                loss = recipe.loss(drafter, batch, normed, head)
            optimizer.zero_grad()
            loss.backward()
            recipe.clip(parameters)
            optimizer.step()
            bar.update(number + 1, loss=loss.item())
            if number == last_steps[epoch]:
                yield epoch


def _shuffled(store: Store) -> list[list[int]]:
    """An epoch: sequences in random order, a step's tokens at a time."""
    rows = store.rows(held_out=False)
    groups: list[list[int]] = [[]]
    size = 0
    for i in torch.randperm(len(rows)).tolist():
        if groups[-1] and size + store.length(rows[i]) > TOKENS_PER_STEP:
            groups.append([])
            size = 0
        groups[-1].append(rows[i])
        size += store.length(rows[i])
    return groups
