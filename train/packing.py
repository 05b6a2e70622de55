"""Sequences to batches: which sequences go into a step, and the tokens that follow each position."""

from collections.abc import Iterable, Iterator

import torch
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.store.format import Sequence

_TOKENS_IN_BATCH = 4096  # `pack_in_order` packs up to this many tokens; a longer sequence is alone


def pack_epoch(lengths: list[int], *, tokens_per_step: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle sequences and fill steps up to a budget of tokens; a pure function of its arguments, whatever the number of processes.

    Args:
        lengths: tokens of each sequence.
        tokens_per_step: budget of a step; a longer sequence gets a step of its own.

    Returns indices into `lengths`, one list per step; each index once.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    steps: list[list[int]] = []
    room = 0
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        if not steps or lengths[index] > room:
            steps.append([])
            room = tokens_per_step
        steps[-1].append(index)
        room -= lengths[index]
    return steps


def balance_tokens(lengths: list[int], shares: int) -> list[list[int]]:
    """Divide a step's sequences into shares of about as many tokens: the longest first, each to the smallest share.
    Returns ascending indices into `lengths`, one list per share; empty ones where there are fewer sequences than
    shares."""
    divided: list[list[int]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        least = loads.index(min(loads))
        divided[least].append(index)
        loads[least] += lengths[index]
    return [sorted(share) for share in divided]


def pack_in_order(sequences: Iterable[Sequence], *, steps: int) -> Iterator[Batch]:
    """Pack sequences in order, several to a batch, taking each from the iterable only when it is due."""
    group: list[Sequence] = []
    tokens = 0
    for sequence in sequences:
        if group and tokens + len(sequence.token_ids) > _TOKENS_IN_BATCH:
            yield pack(group, steps=steps)
            group, tokens = [], 0
        group.append(sequence)
        tokens += len(sequence.token_ids)
    if group:
        yield pack(group, steps=steps)


def pack(sequences: Iterable[Sequence], *, steps: int, prompt_weight: float = 0.0) -> Batch:
    """Put sequences end to end.

    A row is a token with a state. Its loss weight at chain step k is 1 when the token that it predicts, x_{p+2+k}, exists
    and is part of a response (including the first response token), `prompt_weight` when it is part of the prompt.

    Args:
        sequences: with the same layers.
        steps: K.
        prompt_weight: 0 to 1.
    """
    packed = []
    for number, sequence in enumerate(sequences):
        rows = len(sequence.hidden_states)
        ids = F.pad(sequence.token_ids.long(), (0, steps + 2))
        weight = F.pad(torch.where(sequence.loss_mask, 1.0, prompt_weight), (0, steps + 2))
        # Row p gets the tokens [p+1, ..., p+1+K] and the weights of [p+2, ..., p+1+K].
        next_tokens, weights = ids[1:].unfold(0, steps + 1, 1)[:rows], weight[2:].unfold(0, steps, 1)[:rows]
        packed.append((sequence.hidden_states, next_tokens, weights, torch.arange(rows), torch.full((rows,), number)))
    return Batch(*(torch.cat(parts) for parts in zip(*packed, strict=True)))
