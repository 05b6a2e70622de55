"""Predicted acceptance length: what speculative decoding would accept on held-out text, without an engine.

Greedy decoding. A chain's guess at step k is only looked at when all guesses before it were right, and then the tokens
before it are the true ones; so running the chain on true tokens and comparing each argmax with what the target wrote
tells exactly which drafts would be accepted (`predict_acceptance`).

Sampling. The target accepts a guess with a probability, which is known exactly at every place of the text; what follows
an accepted guess is only known where the text took that guess. See `predict_sampled_acceptance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.base import ChainStep, Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.store.format import Sequence
from draftsmith.train.loss import row_chunks
from draftsmith.train.packing import pack

_TOKENS_AT_ONCE = 4096
"""Sequences are packed up to this many tokens; a longer one is alone."""


def predict_acceptance(
    drafter: Drafter,
    sequences: Iterable[Sequence],
    columns: list[int],
    *,
    k: int,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
) -> dict[int, float]:
    """Predicted acceptance length for every number of speculative tokens from 1 to `k`.

    Args:
        drafter: the module.
        sequences: held-out conversations that the target answered greedily; gone through once, a few at a time.
        columns: which of the sequences' states the drafter reads.
        k: longest chain.
        add_up: what adds the counts (int64 [k, 2], on the drafter's device) of several processes, each with its part of the
            conversations.

    Returns:
        {K: tokens per verification step of the target, the bonus token included}.
    """
    counted = count_accepted(drafter, sequences, columns, k=k)
    counts = add_up(torch.tensor([*counted.values()], device=next(drafter.parameters()).device)).tolist()
    return {length: 1 + hits / max(drafts, 1) for length, (hits, drafts) in zip(counted, counts, strict=True)}


@torch.no_grad()
def count_accepted(
    drafter: Drafter, sequences: Iterable[Sequence], columns: list[int], *, k: int
) -> dict[int, tuple[int, int]]:
    """What `predict_acceptance` divides, for whoever adds sequences up in several ways; same arguments.

    Returns:
        {K: (tokens accepted, drafts made)}, both over all sequences.
    """
    training = drafter.training
    drafter.eval()
    accepted = {length: [0, 0] for length in range(1, k + 1)}  # K: [tokens accepted, drafts made]
    for everything in _packed(drafter, sequences, steps=k):
        batch = everything.with_layers(columns)
        rows = batch.loss_weights.sum(1).nonzero()[:, 0]
        right = torch.stack(
            [
                (_guesses(drafter, step) == batch.next_tokens[rows, j + 1]) & (step.loss_weights > 0)
                for j, step in enumerate(drafter.chain(batch, steps=k))
            ],
            dim=1,
        )
        run = right.int().cumprod(1).cpu()  # [Q, k]: 1 while every guess so far is right
        for response in _responses(batch, rows):
            for length, totals in accepted.items():
                for hits in _walk(run[response, :length].sum(1).tolist()):
                    totals[0] += hits
                    totals[1] += 1
    drafter.train(training)
    return {length: (hits, drafts) for length, (hits, drafts) in accepted.items()}


@dataclass(frozen=True)
class SampledAcceptance:
    """Predicted acceptance length when the target samples, by number of speculative tokens."""

    greedy_drafts: dict[int, float]
    """The drafter proposes its most likely token, as in vLLM."""
    sampled_drafts: dict[int, float]
    """The drafter samples at the same temperature from its own distribution."""


@torch.no_grad()
def predict_sampled_acceptance(
    drafter: Drafter,
    sequences: Iterable[Sequence],
    columns: list[int],
    *,
    k: int,
    temperature: float,
    last_column: int,
    norm: nn.RMSNorm,
    head: torch.Tensor,
) -> SampledAcceptance:
    """Predicted acceptance length at a temperature.

    With p the target's distribution at that temperature and q the drafter's, rejection sampling accepts the drafter's
    most likely token d with probability p(d), and a token drawn from q with probability sum_v min(p(v), q(v))
    (Leviathan et al., arXiv 2211.17192). These are exact at every place of the text, for the text before it.

    The length is an estimate, in two ways. A chain's probability is the product of the probabilities at its steps,
    each given the true tokens before it and not the accepted guesses. And the places that serving drafts from, which
    depend on what was accepted, are taken along this text. Both vanish as the temperature falls to 0, on greedy text:
    the result is then `predict_acceptance`'s.

    Args:
        drafter: the module.
        sequences: held-out conversations that the target answered; best at this temperature.
        columns: which of the sequences' states the drafter reads.
        k: longest chain.
        temperature: above 0.
        last_column: which of the states is the target's last, before its final norm.
        norm: the target's final norm.
        head: [vocab, H], the target's whole head.
    """
    training = drafter.training
    drafter.eval()
    totals = {(draft, length): [0.0, 0.0] for draft in range(2) for length in range(1, k + 1)}  # tokens, drafts
    for everything in _packed(drafter, sequences, steps=k):
        batch = everything.with_layers(columns)
        rows = batch.loss_weights.sum(1).nonzero()[:, 0]
        steps = list(drafter.chain(batch, steps=k))
        states = norm(everything.hidden_states[:, last_column])
        accept = states.new_zeros(2, len(rows), k)  # of greedy and of sampled drafts
        for part in row_chunks(len(states), len(head), states.device.type):
            p = (F.linear(states[part], head) / temperature).softmax(-1)[:, drafter.draft_token_ids]
            for j, step in enumerate(steps):
                teacher = rows + 1 + j - part.start
                here = ((teacher >= 0) & (teacher < len(p)) & (step.loss_weights > 0)).nonzero()[:, 0]
                logits = F.linear(step.normed[here], step.head)
                wanted = p[teacher[here]]
                accept[0, here, j] = wanted.gather(1, logits.argmax(-1, keepdim=True))[:, 0]
                accept[1, here, j] = wanted.minimum((logits / temperature).softmax(-1)).sum(-1)
        chain = accept.double().cumprod(2).cpu()  # probability that the first j + 1 guesses are all accepted
        for response in _responses(batch, rows):
            for (draft, length), total in totals.items():
                tokens, drafts = _expected_walk(chain[draft, response, :length].tolist())
                total[0] += tokens
                total[1] += drafts
    drafter.train(training)
    lengths = {key: 1 + tokens / max(drafts, 1.0) for key, (tokens, drafts) in totals.items()}
    return SampledAcceptance(*({length: lengths[draft, length] for length in range(1, k + 1)} for draft in range(2)))


def predicted_speedup(lengths: Mapping[int, float], step_costs: Mapping[int, float]) -> dict[int, float]:
    """Speed over plain decoding, for every K that both know.

    Args:
        lengths: {K: predicted acceptance length}.
        step_costs: {K: seconds of a decoding step with K speculative tokens over those of a plain step}, as
            `draftsmith evaluate` measures them; they depend on the drafter's shape and the machine, not on its weights.
    """
    return {k: length / step_costs[k] for k, length in lengths.items() if k in step_costs}


def _packed(drafter: Drafter, sequences: Iterable[Sequence], *, steps: int) -> Iterator[Batch]:
    """The sequences in order, several at a time, in the drafter's dtype and on its device."""
    like = next(drafter.parameters())

    def batch(group: list[Sequence]) -> Batch:
        packed = pack(group, steps=steps)
        return replace(packed, hidden_states=packed.hidden_states.to(like.dtype)).to(like.device)

    group: list[Sequence] = []
    tokens = 0
    for sequence in sequences:
        if group and tokens + len(sequence.token_ids) > _TOKENS_AT_ONCE:
            yield batch(group)
            group, tokens = [], 0
        group.append(sequence)
        tokens += len(sequence.token_ids)
    if group:
        yield batch(group)


def _guesses(drafter: Drafter, step: ChainStep) -> torch.Tensor:
    """int64 [Q]: the step's most likely tokens, the target's ids."""
    guesses = torch.empty(len(step.normed), dtype=torch.long, device=step.normed.device)
    for rows in row_chunks(len(step.normed), len(step.head), step.normed.device.type):
        guesses[rows] = F.linear(step.normed[rows], step.head).argmax(-1)
    return drafter.draft_token_ids[guesses]


def _responses(batch: Batch, rows: torch.Tensor) -> Iterable[torch.Tensor]:
    """The answers: stretches of consecutive rows that predict a response token at once, as places in `rows`.

    Other rows only reach one later in the chain. The last row of a document predicts nothing, so no stretch goes on
    into the next document.
    """
    places = (batch.loss_weights[rows, 0] > 0).nonzero()[:, 0].cpu()
    ends = (rows.cpu()[places].diff() != 1).nonzero()[:, 0] + 1
    return places.tensor_split(ends)


def _walk(accepted_from: list[int]) -> Iterable[int]:
    """Visit the positions that serving would draft from: each draft moves on by its accepted tokens and one more."""
    # The first row predicts the first response token, which serving gets from prefill: it drafts from the next.
    position = 1
    while position < len(accepted_from):
        yield accepted_from[position]
        position += accepted_from[position] + 1


def _expected_walk(chain: list[list[float]]) -> tuple[float, float]:
    """`_walk` where each draft is accepted with a probability.

    Args:
        chain: for each position, the probability that at least 1, 2, ... K tokens are accepted.

    Returns:
        Expected numbers of accepted tokens and of drafts.
    """
    visits = [0.0] * len(chain)  # probability that serving drafts from here
    if len(visits) > 1:
        visits[1] = 1.0
    tokens = 0.0
    for position, at_least in enumerate(chain):
        tokens += visits[position] * sum(at_least)
        for accepted, (reached, further) in enumerate(pairwise([1.0, *at_least, 0.0])):
            if (landing := position + accepted + 1) < len(visits):
                visits[landing] += visits[position] * (reached - further)
    return tokens, sum(visits)
