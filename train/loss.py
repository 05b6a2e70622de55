"""The loss of a chain drafter: at each step, the drafter's distribution against the target's.

No tensor of size [rows, vocabulary] is ever in memory: head, softmax, loss and gradient are computed in chunks of rows, each
once. The weights of the rows are known beforehand, so the forward pass already computes the gradient of the logits, and the
backward pass only scales it.

Shape legend: T packed rows, K chain steps, Q rows that are drafted from, N rows that supervise, H hidden size, V vocabulary
that the loss is taken over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.base import Drafter, LossTerms
from draftsmith.drafters.batch import Batch

LossName = Literal["cross_entropy", "kl", "total_variation"]

_LOGITS_AT_ONCE = 1 << 21
"""Logits in a chunk of rows: 8 MiB in float32, which stay in a CPU's cache between passes over them."""
_LOGITS_AT_ONCE_ON_GPU = 1 << 27
"""512 MiB in float32, a few of which are in memory at once. A chunk that fits a GPU's cache would not keep it busy."""
_LEAST_ROWS = 128  # fewest rows in a chunk: with fewer, a product is bound by reading the head from memory
ROWS_ASKED = 256
"""Rows of a batch whose teacher distributions choose the subset of the draft vocabulary that its loss is taken over, and as many
whose drafter distributions do."""
_DRAWN = 6  # one in so many tokens of the subset is drawn at random
_SPARSE = 0.9
"""A step that is trained for less than this share of the rows is computed for those alone; for few others, that costs more than it saves."""


def rows_at_once(vocab: int, device: str) -> int:
    """Rows whose logits over `vocab` tokens are computed at once on a type of `device`, by torch's name."""
    at_once = _LOGITS_AT_ONCE if device == "cpu" else _LOGITS_AT_ONCE_ON_GPU
    return max(_LEAST_ROWS, at_once // vocab)


def row_chunks(rows: int, vocab: int, device: str) -> Iterator[slice]:
    """Slices of `rows` rows, `rows_at_once` in each."""
    size = rows_at_once(vocab, device)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class ChainLossOutput(NamedTuple):
    """Loss of a batch, and the drafter's top-1 accuracy. A tuple: FSDP2 reduces gradients from a hook on the tensors that a module returns,
    and before torch 2.12 it finds none in a dataclass."""

    loss: torch.Tensor
    """Scalar: sum over chain steps of decay^k times the weighted mean over rows."""
    matches: torch.Tensor
    """[K]: weighted share of the rows whose largest logit is the true token's, by chain step."""


@dataclass
class _TeacherAlignment:
    """Which teacher row supervises which draft step: row t supervises, at step k, the draft made from p = t - 1 - k; all of
    them predict x_{t+1}."""

    rows: torch.Tensor  # int64 [N] ascending: the rows t of the batch that supervise any draft
    labels: torch.Tensor  # int64 [N]: x_{t+1}, as an index into the draft vocabulary
    drafts: torch.Tensor  # int64 [K, N]: index of each draft among the Q rows drafted from; 0 where there is none
    weights: torch.Tensor  # float64 [K, N]: the draft's weight in the loss; 0 where there is none


class ChainLoss(nn.Module):
    """The drafter's distribution against the target's, over the draft vocabulary.

    For the row at p and chain step k, the teacher is the target at position p+1+k, whose last state is in the same
    batch: its logits are `lm_head(norm(h))`, under its soft cap, restricted to the draft vocabulary. Rows whose true token is
    outside the draft vocabulary are left out: no draft token would be right there. A kind may learn the target's tokens instead
    of its distribution, and the target's normed state as well (`terms`).

    Args:
        drafter: the module to train.
        teacher_norm: the target's final norm.
        teacher_head: [V, H], the target's head rows for the draft vocabulary, times its scale of logits.
        teacher_soft_cap: c, where the target's logits become c * tanh(logits / c).
        ttt_steps: K.
        ttt_loss_decay: weight of step k is ttt_loss_decay**k (EAGLE-3's reference code: 0.8), unless `terms` weigh by acceptance.
        loss: distance of the drafter's distribution q from the target's p. `cross_entropy`: -sum p log q. `kl`: the same
            less the target's entropy, so it is 0 where q = p; the gradients are equal. `total_variation`:
            1/2 sum |p - q|, the probability that a token drawn from q is rejected (Leviathan et al., arXiv 2211.17192).
        loss_vocab_size: take each batch's loss over this many tokens of the draft vocabulary, those that matter in
            the batch and a sample of the rest (`_subset`); None for all. The head is most of a small drafter's work.
        terms: what the drafter learns; None for the target's distribution alone.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        teacher_norm: nn.Module,
        teacher_head: torch.Tensor,
        teacher_soft_cap: float | None = None,
        ttt_steps: int,
        ttt_loss_decay: float,
        loss: LossName = "cross_entropy",
        loss_vocab_size: int | None = None,
        terms: LossTerms | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.ttt_steps, self.ttt_loss_decay, self.loss_vocab_size = ttt_steps, ttt_loss_decay, loss_vocab_size
        self.loss, self.terms, self.teacher_soft_cap = loss, terms or LossTerms(), teacher_soft_cap
        self.teacher_norm = teacher_norm.requires_grad_(False)
        self.register_buffer("teacher_head", teacher_head, persistent=False)
        ids = drafter.draft_token_ids
        to_draft = torch.full((drafter.config.vocab_size,), -1, device=ids.device)
        to_draft[ids] = torch.arange(len(ids), device=ids.device)
        self.register_buffer("to_draft", to_draft, persistent=False)

    teacher_head: torch.Tensor
    to_draft: torch.Tensor

    def forward(self, batch: Batch, divisors: torch.Tensor | None = None) -> ChainLossOutput:
        """Loss of one batch.

        Args:
            batch: packed rows with the drafter's states and the target's last; K columns.
            divisors: [K], what the sum over rows of each step is divided by; None for the batch's own `weights`.
        """
        assert batch.last_states is not None
        alignment = self._align(batch)
        divisors = alignment.weights.sum(1) if divisors is None else divisors
        with torch.no_grad():
            states = self.teacher_norm(batch.last_states[alignment.rows])
            decay = self.ttt_loss_decay ** torch.arange(self.ttt_steps, device=divisors.device).double()
            weights = (alignment.weights * (decay / divisors.clamp(min=1))[:, None]).to(_sum_dtype(states.dtype))
            trained = [
                rows if len(rows) < _SPARSE * weights.shape[1] else None for rows in _rows_with_a_weight(weights)
            ]

        normed: list[torch.Tensor] = []  # [N, H] each: the rows of every step line up with the teacher's
        heads: list[torch.Tensor] = []
        head_of: list[int] = []
        for step, drafts in zip(self.drafter.chain(batch, steps=self.ttt_steps), alignment.drafts, strict=True):
            normed.append(step.normed.index_select(0, drafts))
            if not heads or step.head is not heads[-1]:  # else the head of a step before
                heads.append(step.head)
            head_of.append(len(heads) - 1)
        labels, teacher_head = alignment.labels, self.teacher_head
        subset = self._subset(states, normed, [heads[index] for index in head_of], alignment)
        if subset is not None:
            labels = torch.searchsorted(subset.columns[: subset.kept], labels)
            teacher_head, *heads = (head[subset.columns] for head in (teacher_head, *heads))
        targets = _LossTargets(labels, subset)
        if self.terms.targets == "distribution":
            targets = replace(targets, states=states, head=teacher_head, soft_cap=self.teacher_soft_cap)
        total, right, _ = _HeadLoss.apply(
            self.loss, targets, weights * self.terms.token_weight, trained, head_of, 0, *normed, *heads
        )
        if self.terms.feature_weight:
            for each, weight in zip(normed, weights, strict=True):
                apart = F.smooth_l1_loss(each, states, reduction="none").mean(-1)
                total = total + self.terms.feature_weight * (apart * weight).sum()
        total = total if len(states) else total + self._nothing()
        counted = batch.loss_weights[:, : self.ttt_steps].sum(0)
        matches = (right * alignment.weights).sum(1) / counted.clamp(min=1)
        return ChainLossOutput(total, matches.to(total.dtype))

    def _nothing(self) -> torch.Tensor:
        """0, of which every trained parameter has a gradient of 0. Attention of no rows reads no keys, and where a process trains nothing
        DDP and FSDP would wait for the gradients of their weights."""
        trained = (parameter for parameter in self.drafter.parameters() if parameter.requires_grad)
        return torch.stack([parameter.sum() * 0 for parameter in trained]).sum()

    def weights(self, batch: Batch) -> torch.Tensor:
        """float64 [K]: the sum of the row weights at each step, which the loss is divided by."""
        return self._align(batch).weights.sum(1)

    @torch.no_grad()
    def _align(self, batch: Batch) -> _TeacherAlignment:
        counts = batch.loss_weights[:, : self.ttt_steps]
        queries = counts.sum(1).nonzero()[:, 0]
        labels = self.to_draft[batch.next_tokens[queries, 1 : self.ttt_steps + 1]]  # [Q, K], -1 outside
        draft, step = ((counts[queries] > 0) & (labels >= 0)).nonzero().unbind(1)
        teachers = queries[draft] + 1 + step
        rows, place = teachers.unique(return_inverse=True)  # several drafts share a teacher
        drafts = rows.new_zeros(self.ttt_steps, len(rows)).index_put((step, place), draft)
        counts = counts.double()
        weights = counts.new_zeros(drafts.shape).index_put((step, place), counts[queries[draft], step])
        label = torch.zeros_like(rows).index_put((place,), labels[draft, step])
        return _TeacherAlignment(rows, label, drafts, weights)

    @torch.no_grad()
    def _subset(
        self, states: torch.Tensor, normed: list[torch.Tensor], heads: list[torch.Tensor], alignment: _TeacherAlignment
    ) -> _VocabularySubset | None:
        """The subset of the draft vocabulary that this batch's loss is taken over; None for all of it.

        It keeps the tokens that teacher and drafter find likely, judged by rows spread over the batch, and every true token.
        The rest has little probability in any row and costs as much, but its probability would grow if it were never pushed
        down. So some of the rest are drawn at random, and each stands for as many as it was drawn from. There are
        loss_vocab_size tokens, or more where the batch has more different true tokens.

        Args:
            states: [N, H], the target's normed states.
            normed: of each chain step [N, H].
            heads: of each chain step [V, H].
        """
        vocab = len(self.teacher_head)
        if self.loss_vocab_size is None or self.loss_vocab_size >= vocab:
            return None
        mass = states.new_zeros(vocab, dtype=_sum_dtype(states.dtype))
        asked = [(states[:: math.ceil(len(states) / ROWS_ASKED) or 1], self.teacher_head, self.teacher_soft_cap)]
        for head in {id(head): head for head in heads}.values():  # one product for all steps with the same
            some = []
            for x, used, weights in zip(normed, heads, alignment.weights, strict=True):
                if used is head:
                    there = weights.nonzero()[:, 0]
                    some.append(x[there[:: math.ceil(len(there) * len(normed) / ROWS_ASKED) or 1]])
            asked.append((torch.cat(some), head, None))
        for x, head, soft_cap in asked:
            for rows in row_chunks(len(x), vocab, x.device.type):
                mass += capped(F.linear(x[rows], head), soft_cap).softmax(-1, dtype=mass.dtype).sum(0)
        mass[alignment.labels] = torch.inf
        drawn = self.loss_vocab_size // _DRAWN
        kept = max(self.loss_vocab_size - drawn, int(mass.isinf().sum()))
        if kept == vocab:  # every draft token is a true one of the batch
            return None
        best = mass.topk(kept).indices.sort().values
        chance = torch.rand(vocab, device=mass.device)
        chance[best] = -1
        drawn = min(drawn, vocab - kept)
        log_weights = mass.new_zeros(kept + drawn)
        log_weights[kept:] = math.log((vocab - kept) / max(drawn, 1))
        return _VocabularySubset(torch.cat([best, chance.topk(drawn).indices.sort().values]), kept, log_weights)


@dataclass
class _DraftTokens:
    """The N draft tokens of a batch that are trained, row by row of the Q that are drafted from."""

    place: torch.Tensor  # int64 [N] ascending: row * K + chain step
    labels: torch.Tensor  # int64 [N]: the true tokens, as indices into the draft vocabulary
    teachers: torch.Tensor  # int64 [N]: the rows of the batch that the target predicts them from
    weights: torch.Tensor  # float64 [N], in the loss


class BlockLoss(ChainLoss):
    """Cross-entropy for kinds that draft from few rows of a batch and read all draft tokens with one head.

    To that, by `terms`, come the distance between the two distributions and the loss of the confidence head. These need the target's
    distribution, which the cross-entropy against its tokens does not.

    `ChainLoss` lines up what supervises with what drafts, and would go through the head K times as often as there is something to
    train.
    """

    def forward(self, batch: Batch, divisors: torch.Tensor | None = None) -> ChainLossOutput:
        assert batch.last_states is not None
        tokens, steps = self._tokens(batch), self.ttt_steps
        divisors = self._by_step(tokens, tokens.weights) if divisors is None else divisors
        chain = list(self.drafter.chain(batch, steps=steps))
        head = chain[0].head
        normed = torch.stack([step.normed for step in chain], dim=1).flatten(0, 1).index_select(0, tokens.place)
        with torch.no_grad():
            states = self.teacher_norm(batch.last_states[tokens.teachers])
        alignment = _TeacherAlignment(tokens.teachers, tokens.labels, tokens.place[None], tokens.weights[None])
        labels, subset = tokens.labels, self._subset(states, [normed], [head], alignment)
        if subset is not None:
            labels, head = torch.searchsorted(subset.columns[: subset.kept], labels), head[subset.columns]
        targets = _LossTargets(labels, subset)

        terms, alpha = self.terms, self.terms.acceptance_alpha
        loss: LossName | _Mixture = self.loss
        mixed = bool(terms.variation_weight or terms.confidence_weight)
        if mixed or terms.targets == "distribution":
            teacher_head = self.teacher_head if subset is None else self.teacher_head[subset.columns]
            targets = replace(targets, states=states, head=teacher_head, soft_cap=self.teacher_soft_cap)
        if mixed:
            loss = _Mixture(terms.token_weight, terms.variation_weight, terms.targets)
        decay = (self.ttt_loss_decay if alpha is None else 1.0) ** torch.arange(steps, device=divisors.device).double()
        weights = tokens.weights * (decay / divisors.clamp(min=1))[tokens.place % steps]
        if alpha is not None:
            likely = _label_probabilities(normed.detach(), head.detach(), targets)
            rows = len(chain[0].normed)
            weights = weights * _acceptance_weights(likely, tokens.place, rows=rows, steps=steps, alpha=alpha)
        weights = weights.to(_sum_dtype(states.dtype))
        scaled = weights if isinstance(loss, _Mixture) else weights * terms.token_weight
        total, right, overlap = _HeadLoss.apply(
            loss, targets, scaled[None], [None], [0], chain[0].frozen_columns, normed, head
        )
        if terms.confidence_weight:
            said = torch.stack([step.confidence for step in chain if step.confidence is not None], dim=1).flatten()
            said = said.index_select(0, tokens.place).to(weights.dtype)
            each = F.binary_cross_entropy_with_logits(said, overlap[0], reduction="none")
            total = total + terms.confidence_weight * (each * weights).sum()
        total = total if len(states) else total + self._nothing()
        counted = batch.loss_weights[:, :steps].sum(0)
        matches = self._by_step(tokens, right[0] * tokens.weights) / counted.clamp(min=1)
        return ChainLossOutput(total, matches.to(total.dtype))

    def weights(self, batch: Batch) -> torch.Tensor:
        tokens = self._tokens(batch)
        return self._by_step(tokens, tokens.weights)

    def _by_step(self, tokens: _DraftTokens, values: torch.Tensor) -> torch.Tensor:
        """Sums [K] of `values` [N] by chain step."""
        return values.new_zeros(self.ttt_steps).index_add(0, tokens.place % self.ttt_steps, values)

    @torch.no_grad()
    def _tokens(self, batch: Batch) -> _DraftTokens:
        steps = self.ttt_steps
        queries = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
        counts = batch.loss_weights[queries, :steps].double().flatten()
        labels = self.to_draft[batch.next_tokens[queries, 1 : steps + 1]].flatten()  # -1 outside
        learned = (counts > 0) & (labels >= 0)
        if self.terms.supervised_prefix:
            learned = learned.view(-1, steps).cumprod(1).flatten().bool()
        place = learned.nonzero()[:, 0]
        teachers = queries[place // steps] + 1 + place % steps
        return _DraftTokens(place, labels[place], teachers, counts[place])


@dataclass
class _VocabularySubset:
    """C tokens of the draft vocabulary."""

    columns: torch.Tensor  # int64 [C]: the kept tokens, ascending; then those drawn from the rest, ascending
    kept: int  # number of kept tokens; every true token is among them
    log_weights: torch.Tensor
    """[C], added to the logits: log of the number of tokens that each stands for. The sum of exp(logits) is then estimated
    without bias, and the drawn tokens push down those left out (Bengio and Senecal 2008, doi 10.1109/TNN.2007.912312;
    Jean et al., arXiv 1412.2007)."""


@dataclass(frozen=True)
class _Mixture:
    """A loss of two terms: -log q(label) or -sum p log q, by `targets`, and sum |p - q|."""

    token_weight: float
    variation_weight: float
    targets: Literal["distribution", "tokens"] = "tokens"

    def cross_entropy(
        self, logits: torch.Tensor, labels: torch.Tensor, p: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first term [R] without its weight, and its gradient in the logits."""
        if self.targets == "tokens":
            return _token_cross_entropy(logits, labels)
        q = logits.softmax(-1)
        each = _cross_entropy(logits, q, p)
        return each, q.sub_(p)


def _against_distribution(loss: LossName | _Mixture) -> bool:
    """Whether a term of the loss is -sum p log q."""
    return loss == "cross_entropy" if isinstance(loss, str) else loss.targets == "distribution"


@dataclass
class _LossTargets:
    """What N rows should predict."""

    labels: torch.Tensor  # int64 [N]: the target's tokens
    subset: _VocabularySubset | None  # the tokens of the heads' rows; None for the whole draft vocabulary
    states: torch.Tensor | None = None  # [N, H], the target's normed states; None where only the labels are learned
    head: torch.Tensor | None = None  # [V, H], the target's head; with `states` and `soft_cap`, its distribution
    soft_cap: float | None = None


@torch.no_grad()
def _label_probabilities(normed: torch.Tensor, head: torch.Tensor, targets: _LossTargets) -> torch.Tensor:
    """The drafter's probability of each row's label [N], from the head's inputs [N, H]."""
    # The loss computes these logits once more: the weight of a draft token depends on all tokens of its row.
    device = normed.device.type
    dtype = _logit_inputs(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else normed.dtype, device
    )
    normed, head = normed.to(dtype), head.to(dtype)
    log_weights = None if targets.subset is None else targets.subset.log_weights.to(_sum_dtype(dtype))
    found = normed.new_empty(len(normed), dtype=_sum_dtype(normed.dtype))
    with torch.autocast(device, enabled=False):
        for rows in row_chunks(len(normed), len(head), device):
            logits = _logits(normed[rows], head, log_weights)
            found[rows] = (logits.gather(1, targets.labels[rows, None])[:, 0] - logits.logsumexp(-1)).exp()
    return found


def _acceptance_weights(
    probabilities: torch.Tensor, place: torch.Tensor, *, rows: int, steps: int, alpha: float
) -> torch.Tensor:
    """D-PACE (arXiv 2605.18810): the weight of a row's draft token j is the sum over m >= j of the product over i <= m of
    (1 - alpha) q_i + alpha, where q_i is the drafter's probability of the true token i: the number of tokens that j decides on. A token
    that is not trained, for instance outside the draft vocabulary, has q_i = 0, since no draft gets past it.

    Args:
        probabilities: [N], of the tokens that are trained.
        place: int64 [N]: row * steps + draft token.

    Returns [N].
    """
    known, trained = probabilities.new_zeros(2, rows * steps)
    known[place], trained[place] = probabilities, 1
    reached = ((1 - alpha) * known + alpha).view(rows, steps).cumprod(1) * trained.view(rows, steps)
    return reached.flip(1).cumsum(1).flip(1).flatten()[place]


class _HeadLoss(torch.autograd.Function):
    """Sum over steps and rows of weight * loss(normed @ head.T), with the gradients of `normed` and of trained heads.

    The rows are the teacher's: its distribution is computed once per chunk and used for all steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: LossName | _Mixture,
        targets: _LossTargets,
        weights: torch.Tensor,
        trained: list[torch.Tensor | None],
        head_of: list[int],
        frozen: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Args:
            loss: see `ChainLoss`; a mixture needs the target's distribution.
            targets: for N rows.
            weights: [K, N].
            trained: of each step, on the CPU: int64 ascending, the rows that it is computed for, which have all of its weight; None for all.
            head_of: index of the head that each step uses.
            frozen: the first columns of the heads, so many, whose gradient is left 0: it would be the largest product of all, and unused.
            tensors: `normed` [N, H] of each step, then the heads [V, H]. Products are in autocast's dtype where it is on.

        Returns the sum; bool [K, N]: whether a row's largest logit is its label's, false where it was left out; and [K, N], for a mixture only:
        1 - sum |p - q| / 2.
        """
        steps, device = len(weights), weights.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[0].dtype
        # Cast once here, instead of by autocast in every chunk.
        normed, heads = ([x.detach().to(dtype) for x in each] for each in (tensors[:steps], tensors[steps:]))
        reads = _logit_inputs(dtype, device)
        read_heads = heads if reads == dtype else [head.detach().to(reads) for head in tensors[steps:]]
        teacher = None
        if targets.states is not None and targets.head is not None:
            teacher = targets.states.to(reads), targets.head.to(reads)
        d_normed = [torch.zeros_like(x) for x in tensors[:steps]]
        d_heads = [
            torch.zeros_like(head, dtype=_sum_dtype(dtype)) if learns else None
            for head, learns in zip(heads, ctx.needs_input_grad[6 + steps :], strict=True)
        ]
        log_weights, kept = None, len(heads[0])
        if targets.subset is not None:
            log_weights, kept = targets.subset.log_weights.to(_sum_dtype(dtype)), targets.subset.kept
        total = weights.new_zeros((), dtype=_sum_dtype(dtype))
        right = torch.zeros_like(weights, dtype=torch.bool)
        overlap = torch.zeros_like(weights)
        on_device = {k: some.to(weights.device) for k, some in enumerate(trained) if some is not None}
        with torch.autocast(device, enabled=False):
            for chunk in row_chunks(weights.shape[1], len(heads[0]), device):
                ends = torch.tensor([chunk.start, chunk.stop])
                taught = _logits(teacher[0][chunk], teacher[1], log_weights, targets.soft_cap) if teacher else None
                all_p = None if taught is None else taught.softmax(-1)
                constants = weights.new_zeros(weights[0, chunk].shape)  # in what is trained
                if loss == "kl" and taught is not None and all_p is not None:
                    constants = _cross_entropy(taught, all_p, all_p)  # the log weights are in both, and cancel
                elif _against_distribution(loss) and all_p is not None and log_weights is not None:
                    constants = -(all_p @ log_weights.to(all_p.dtype))  # log q of a token is without its log weight
                del taught  # nothing is as large as the logits of a chunk: free them as early as possible
                for k, used in enumerate(head_of):
                    rows: slice | torch.Tensor = chunk
                    p, constant = all_p, constants
                    if (some := trained[k]) is not None:
                        rows = on_device[k][slice(*torch.searchsorted(some, ends).tolist())]
                        if not len(rows):
                            continue
                        constant = constants[rows - chunk.start]
                        p = None if all_p is None else all_p[rows - chunk.start]
                    x, weight, head, d_head = normed[k][rows], weights[k, rows, None], heads[used], d_heads[used]
                    labels = targets.labels[rows]
                    logits = _logits(x.to(reads), read_heads[used], log_weights)
                    largest = logits[:, :kept].amax(-1)  # on CPUs a twentieth of what its index takes
                    right[k, rows] = logits.gather(1, labels[:, None])[:, 0] == largest
                    if p is None:
                        each, d_logits = _token_cross_entropy(logits, labels)
                    elif isinstance(loss, _Mixture):
                        each, d_logits = _total_variation(logits, p)
                        overlap[k, rows] = 1 - each
                        of_tokens, d_tokens = loss.cross_entropy(logits, labels, p)
                        each = 2 * loss.variation_weight * each + loss.token_weight * (of_tokens - constant)
                        d_logits = d_logits.mul_(2 * loss.variation_weight).add_(d_tokens, alpha=loss.token_weight)
                        del d_tokens
                    elif loss == "total_variation":
                        each, d_logits = _total_variation(logits, p)
                    else:
                        d_logits = logits.softmax(-1)  # q so far
                        each = _cross_entropy(logits, d_logits, p) - constant
                        d_logits -= p
                    total += (each * weight[:, 0]).sum()
                    d_logits = d_logits.to(dtype)
                    d_normed[k][rows] = ((d_logits @ head) * weight).to(d_normed[k].dtype)
                    if d_head is not None:
                        weighted = (x[:, frozen:] * weight).to(dtype)
                        if dtype == d_head.dtype:
                            d_head[:, frozen:].addmm_(d_logits.T, weighted)
                        else:
                            d_head[:, frozen:] += d_logits.T @ weighted
                    del logits, d_logits, p
        ctx.gradients = [*d_normed, *d_heads]
        ctx.mark_non_differentiable(right, overlap)
        return total, right, overlap

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: valid for one backward pass
        return None, None, None, None, None, None, *(g if g is None else g.mul_(grads[0]) for g in gradients)


def _rows_with_a_weight(weights: torch.Tensor) -> list[torch.Tensor]:
    """Of each step, by `weights` [K, N]: int64 ascending, on the CPU. A device is waited for once."""
    return [step.nonzero()[:, 0] for step in (weights != 0).cpu()]


def capped(logits: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """Logits under a target's soft cap; None for none."""
    return logits if soft_cap is None else soft_cap * (logits / soft_cap).tanh()


def _logits(
    x: torch.Tensor, head: torch.Tensor, log_weights: torch.Tensor | None, soft_cap: float | None = None
) -> torch.Tensor:
    """[R, V], in float32 at least, of a pair in `_logit_inputs`; `log_weights` [V] in that dtype."""
    if x.dtype != (wide := _sum_dtype(x.dtype)):
        logits = torch.mm(x, head.T, out_dtype=wide)
    elif soft_cap is None:
        return F.linear(x, head, log_weights)
    else:
        logits = F.linear(x, head)
    logits = capped(logits, soft_cap)
    return logits if log_weights is None else logits.add_(log_weights)


def _logit_inputs(dtype: torch.dtype, device: str) -> torch.dtype:
    """What logits are computed from where products are in `dtype`: that, or float32 where the device would round its results to bfloat16.
    Logits of 20 would be off by up to 0.06, in drafter and target each (docs/log.md has what that cost)."""
    return dtype if dtype == _sum_dtype(dtype) or _keeps_sums(dtype, device) else _sum_dtype(dtype)


@functools.cache
def _keeps_sums(dtype: torch.dtype, device: str) -> bool:
    """Whether products in `dtype` on a type of device can return their sums in float32: on NVIDIA's GPUs, and not on CPUs."""
    x = torch.ones(16, 4096, dtype=dtype, device=device)
    y = x.T.clone()
    y[0] = 2  # sums of 4097, which neither bfloat16 nor float16 has
    try:
        return bool((torch.mm(x, y, out_dtype=torch.float32) == 4097).all())
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums over the vocabulary."""
    return torch.promote_types(dtype, torch.float32)


def _cross_entropy(logits: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """-sum p log q [R], for q = softmax(logits); its gradient in the logits is q - p."""
    # log q = logits - log sum exp(logits), and the largest q is exp(the largest logit) over that sum.
    return logits.amax(-1) - q.amax(-1).log() - torch.linalg.vecdot(p, logits)


def _token_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-log q(label) [R] and its gradient in the logits."""
    log_q = logits.log_softmax(-1)
    each = -log_q.gather(1, labels[:, None])[:, 0]
    d_logits = log_q.exp_()
    d_logits[torch.arange(len(labels), device=labels.device), labels] -= 1
    return each, d_logits


def _total_variation(logits: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1/2 sum |q - p| [R] and its gradient in the logits: q (s - sum q s), for s = sign(q - p) / 2."""
    q = logits.softmax(-1)
    apart = q - p
    each = apart.abs().sum(-1) / 2
    sign = apart.sign_().div_(2)
    return each, sign.sub_(torch.linalg.vecdot(q, sign)[:, None]).mul_(q)
