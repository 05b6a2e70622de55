"""Predicted acceptance length: what speculative decoding would accept on held-out text, without an engine.

The drafter proposes its likeliest token, as vLLM has it by default. The draft token of step k only matters when all draft tokens before
it were right, and then the tokens before it are the true ones; so running the chain on true tokens and comparing each argmax with the
target's token tells exactly which draft tokens would be accepted (`predict_acceptance`). That holds for sampled text too: rejection
sampling against a proposal of a single token keeps that token, or draws another one (vllm/v1/sample/rejection_sampler.py), so the draft
token was accepted if and only if it is the text's. It must be text that the target sampled as it will be served.

At other sampling parameters the target accepts a draft token with a probability, which is known exactly at every position of the text;
what follows an accepted token is only known where the text contains it. See `predict_sampled_acceptance`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.config.sampling import Sampling
from draftsmith.drafters.base import ChainStep, Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.train.loss import capped, row_chunks

_ROWS_AT_ONCE = 4096  # of a batch to draft from, where all draft tokens of a row are in memory together


def predict_acceptance(
    drafter: Drafter,
    batches: Iterable[Batch],
    *,
    k: int,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
) -> dict[int, float]:
    """Predicted acceptance length, {K: tokens per verification step of the target, the bonus token included}, for K from 1 to `k`.

    Args:
        batches: held-out conversations that the target answered as it will be served, greedily or sampled, with `k` columns or more;
            iterated once.
        add_up: adds the counts (int64 [k, 2], on the drafter's device) of all processes, each with its part of the
            conversations.
    """
    counted = count_accepted(drafter, batches, k=k)
    counts = add_up(torch.tensor([*counted.values()], device=next(drafter.parameters()).device)).tolist()
    return {length: 1 + hits / max(drafts, 1) for length, (hits, drafts) in zip(counted, counts, strict=True)}


@torch.no_grad()
def count_accepted(drafter: Drafter, batches: Iterable[Batch], *, k: int) -> dict[int, tuple[int, int]]:
    """The counts behind `predict_acceptance`; same arguments.
    Returns {K: (tokens accepted, drafts made)}, both over all batches."""
    accepted, drafts = [0] * k, [0] * k
    for batch in evaluated(drafter, batches):
        for steps, lengths in _chains(drafter, k):
            rows = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
            right = torch.stack(
                [
                    (_draft_tokens(drafter, step) == batch.next_tokens[rows, j + 1]) & (step.loss_weights > 0)
                    for j, step in enumerate(_chain(drafter, batch, steps=steps))
                ],
                dim=1,
            )
            run = right.int().cumprod(1).cpu()  # [Q, steps]: 1 while every draft token so far is right
            for response in responses(batch, rows):
                for length in lengths:
                    hits = [*walk(run[response, :length].sum(1).tolist())]
                    accepted[length - 1] += sum(hits)
                    drafts[length - 1] += len(hits)
    return dict(enumerate(zip(accepted, drafts, strict=True), start=1))


@dataclass(frozen=True)
class SampledAcceptance:
    """Predicted acceptance length when the target samples, by number of speculative tokens."""

    greedy_drafts: dict[int, float]
    """The drafter proposes its most likely token, as in vLLM (`draft_sample_method: greedy`, its default)."""
    sampled_drafts: dict[int, float]
    """The drafter samples from its own distribution at the same temperature, as in vLLM with `draft_sample_method: probabilistic`,
    which applies neither top-p nor top-k to drafts."""


@torch.no_grad()
def predict_sampled_acceptance(
    drafter: Drafter,
    batches: Iterable[Batch],
    *,
    k: int,
    sampling: Sampling,
    norm: nn.Module,
    head: torch.Tensor,
    soft_cap: float | None = None,
    own_text: bool = False,
) -> SampledAcceptance:
    """Predicted acceptance length when the target samples.

    With p the distribution that the target samples from and q the drafter's, rejection sampling accepts the drafter's
    most likely token d with probability p(d), and a token drawn from q with probability sum_v min(p(v), q(v))
    (Leviathan et al., arXiv 2211.17192). These are exact at every position of the text, for the text before it.

    On text that the target sampled with these very parameters (`own_text`), greedy drafts need no more: the text itself tells which
    draft tokens were accepted, so serving's draft positions are those of the text, and at each the chain's next token is
    accepted with probability p(d) as long as the tokens before it are the text's. Its expectation is the served length.

    Otherwise the length is an estimate, for two reasons. The probability of a chain is the product of the probabilities at its steps,
    each given the true tokens before it and not the accepted draft tokens. And serving's draft positions, which depend on
    what was accepted, are walked along this text. On greedy text both errors vanish as the temperature falls to 0, where
    the result equals that of `predict_acceptance`.

    Args:
        batches: held-out conversations that the target answered, best with these parameters, with the target's last states and
            `k` columns or more; iterated once.
        sampling: not greedy.
        norm: the target's final norm.
        head: [vocab, H], the target's whole head, times its scale of logits.
        soft_cap: of the target's logits.
        own_text: whether the target sampled the answers with these parameters.
    """
    totals = {(draft, length): [0.0, 0.0] for draft in range(2) for length in range(1, k + 1)}  # tokens, drafts
    for batch in evaluated(drafter, batches):
        assert batch.last_states is not None
        states = norm(batch.last_states)
        for steps, lengths in _chains(drafter, k):
            rows = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
            chain = list(_chain(drafter, batch, steps=steps))
            accept = states.new_zeros(2, len(rows), steps)  # of greedy and of sampled drafts
            right = torch.zeros(
                len(rows), steps, dtype=torch.bool, device=states.device
            )  # a greedy draft is the text's
            for part in row_chunks(len(states), len(head), states.device.type):
                logits_of_target = capped(F.linear(states[part], head), soft_cap)
                p = sampled_probabilities(logits_of_target, sampling)[:, drafter.draft_token_ids]
                for j, step in enumerate(chain):
                    teacher = rows + 1 + j - part.start
                    here = ((teacher >= 0) & (teacher < len(p)) & (step.loss_weights > 0)).nonzero()[:, 0]
                    logits = F.linear(step.normed[here], step.head)
                    wanted, likeliest = p[teacher[here]], logits.argmax(-1)
                    accept[0, here, j] = wanted.gather(1, likeliest[:, None])[:, 0]
                    accept[1, here, j] = wanted.minimum((logits / sampling.temperature).softmax(-1)).sum(-1)
                    right[here, j] = drafter.draft_token_ids[likeliest] == batch.next_tokens[rows[here], j + 1]
            accept, run = accept.double().cpu(), right.int().cumprod(1).cpu()
            reached = accept.cumprod(2)  # probability that the first j + 1 draft tokens are all accepted
            # On the target's own text: the same, where the text has shown whether those before it are.
            on_text = accept[0] * torch.cat([torch.ones_like(run[:, :1]), run[:, :-1]], dim=1)
            for response in responses(batch, rows):
                for draft in range(2):
                    for length in lengths:
                        if own_text and draft == 0:
                            accepted, at_least = run[response, :length].sum(1), on_text[response, :length].sum(1)
                            tokens, drafts = _walk_of_text(accepted.tolist(), at_least.tolist())
                        else:
                            tokens, drafts = _expected_walk(reached[draft, response, :length].tolist())
                        totals[draft, length][0] += tokens
                        totals[draft, length][1] += drafts
    found = {key: 1 + tokens / max(drafts, 1.0) for key, (tokens, drafts) in totals.items()}
    return SampledAcceptance(*({length: found[draft, length] for length in range(1, k + 1)} for draft in range(2)))


def sampled_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distributions that a target samples from, as vLLM makes them (`apply_sampling_constraints` and `apply_top_k_top_p`):
    temperature, then top-k, then top-p of what is left. Tokens as likely as the last of the top k stay, as there.

    Args:
        logits: [N, vocab].
        sampling: not greedy.

    Returns:
        [N, vocab], rows that add up to 1, in the logits' dtype.
    """
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    p = logits.softmax(-1)
    if sampling.top_p == 1:
        return p
    ascending, order = p.sort(dim=-1)
    left_out = ascending.cumsum(-1) <= 1 - sampling.top_p
    left_out[:, -1] = False  # at least the likeliest
    p = p.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), 0.0)
    return p / p.sum(-1, keepdim=True)


def predicted_speedup(lengths: Mapping[int, float], step_costs: Mapping[int, float]) -> dict[int, float]:
    """Estimated speedup over the baseline, for every K that has both a predicted acceptance length and a step cost, relative to a
    baseline step."""
    return {k: length / step_costs[k] for k, length in lengths.items() if k in step_costs}


def _chains(drafter: Drafter, k: int) -> list[tuple[int, Iterable[int]]]:
    """The chains to run for drafts of 1 to `k` tokens: of how many steps, and the drafts that it tells of."""
    if drafter.depends_on_k:
        return [(length, [length]) for length in range(1, k + 1)]
    return [(k, range(1, k + 1))]


def _chain(drafter: Drafter, batch: Batch, *, steps: int) -> Iterable[ChainStep]:
    """`drafter.chain`, from some rows at a time where drafts do not depend on each other: a block drafter holds K rows or more for each."""
    weights = batch.loss_weights
    rows = weights[:, :steps].sum(1).nonzero()[:, 0]
    if not drafter.drafts_at_once or len(rows) <= _ROWS_AT_ONCE:
        return drafter.chain(batch, steps=steps)
    parts = []
    for some in rows.split(_ROWS_AT_ONCE):
        of_some = torch.zeros_like(weights).index_copy_(0, some, weights[some])
        parts.append([*drafter.chain(replace(batch, loss_weights=of_some), steps=steps)])
    return [
        ChainStep(torch.cat([one.normed for one in step]), step[0].head, torch.cat([one.loss_weights for one in step]))
        for step in zip(*parts, strict=True)
    ]


def evaluated(drafter: Drafter, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches in the drafter's dtype and on its device, which is in evaluation mode until the last."""
    like, training = next(drafter.parameters()), drafter.training
    drafter.eval()
    yield from (batch.to_dtype(like.dtype).to(like.device) for batch in batches)
    drafter.train(training)


def _draft_tokens(drafter: Drafter, step: ChainStep) -> torch.Tensor:
    """int64 [Q]: the step's most likely tokens, by the target's ids."""
    tokens = torch.empty(len(step.normed), dtype=torch.long, device=step.normed.device)
    for rows in row_chunks(len(step.normed), len(step.head), step.normed.device.type):
        tokens[rows] = F.linear(step.normed[rows], step.head).argmax(-1)
    return drafter.draft_token_ids[tokens]


def responses(batch: Batch, rows: torch.Tensor) -> Iterable[torch.Tensor]:
    """The responses: runs of consecutive rows whose first step predicts a response token, as indices into `rows`.

    Other rows only reach one later in the chain. The last row of a document predicts nothing, so no run crosses into the
    next document.
    """
    places = (batch.loss_weights[rows, 0] > 0).nonzero()[:, 0].cpu()
    ends = (rows.cpu()[places].diff() != 1).nonzero()[:, 0] + 1
    return places.tensor_split(ends)


def walk(accepted_from: list[int]) -> Iterable[int]:
    """Visit the positions that serving would draft from: each draft advances by its accepted tokens and one more."""
    # The first row predicts the first response token, which serving gets from prefill, so it drafts from the next row.
    position = 1
    while position < len(accepted_from):
        yield accepted_from[position]
        position += accepted_from[position] + 1


def _walk_of_text(accepted: list[int], expected: list[float]) -> tuple[float, float]:
    """Tokens expected to be accepted, and drafts, of a `walk` whose positions the text determines.

    Args:
        accepted: for each position, how many draft tokens in a row are the text's.
        expected: for each position, the number of tokens expected to be accepted.
    """
    tokens, drafts, position = 0.0, 0.0, 1
    while position < len(accepted):
        tokens += expected[position]
        drafts += 1
        position += accepted[position] + 1
    return tokens, drafts


def _expected_walk(chain: list[list[float]]) -> tuple[float, float]:
    """Expected numbers of accepted tokens and of drafts of a `walk` where `chain` has, for each position, the probability that at
    least 1, 2, ... K tokens are accepted."""
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
