"""DFlash: packed blocks against one plain forward pass over each, what they see, what they are trained on, and what is predicted."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from draftsmith.config.drafters import DFlashOptions
from draftsmith.config.sampling import Sampling
from draftsmith.convert.convert import Found, convert_checkpoint, read
from draftsmith.convert.inspection import inspect
from draftsmith.convert.publish import publish
from draftsmith.drafters import dflash, tiles
from draftsmith.drafters.base import LossTerms
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.dflash import DFlashConfig, DFlashDrafter
from draftsmith.drafters.init.blocks import _attend_to_distances
from draftsmith.engine.speculation import drafter_sha256, drafts_fixed_k, own_drafter, speculative_config
from draftsmith.run.errors import UserError
from draftsmith.store.format import Sequence
from draftsmith.target.info import describe_target
from draftsmith.train.acceptance import count_accepted, predict_sampled_acceptance, walk
from draftsmith.train.loss import BlockLoss, LossName
from draftsmith.train.packing import pack
from tests.unit.flex_on_cpu import use_flex
from tests.unit.planted import Fault, as_in, late, norms_of, other_config, reads_next_token, sees, without
from tests.unit.test_eagle3 import DRAFT, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, make_sequence
from tests.unit.tiny_run import make_converted, make_recipe, make_run

BLOCK, MASK = 5, 7
STEPS = BLOCK - 1


def make_drafter(**changes: object) -> DFlashDrafter:
    """Random, with norms that differ by layer and are far from 1, so that one taken for another is noticed."""
    fields: dict = {
        "layer_ids": (1, 2, 3), "hidden_size": HIDDEN, "intermediate_size": 20, "num_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "max_position_embeddings": 64,
        "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "block_size": BLOCK, "mask_token_id": MASK,
    }  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randperm(VOCAB)[:DRAFT].sort().values
    drafter = DFlashDrafter(DFlashConfig(**fields | changes), torch.randn(VOCAB, HIDDEN), ids).double()
    for name, parameter in drafter.named_parameters():
        nn.init.uniform_(parameter, 0.5, 3) if "norm" in name else nn.init.normal_(parameter, std=0.3)
    return drafter


def plain_block(
    d: DFlashDrafter,
    sequence: Sequence,
    p: int,
    weights: dict[str, torch.Tensor],
    *,
    steps: int = STEPS,
    from_anchor: bool = False,
) -> torch.Tensor:
    """Logits [steps, V] of the block whose anchor is x_{p+1}: one dense forward pass, by the formulas.

    Args:
        from_anchor: the first draft token is predicted from the anchor's row (DSpark), whose mask is a row of the embedding.
    """

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + d.config.rms_norm_eps).sqrt() * weight

    anchor = p + 1
    context = rms(sequence.hidden_states[:anchor].flatten(1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    token = int(sequence.token_ids[anchor])
    mask = weights.get("mask_embedding", d.embedding[MASK])
    first = mask if token == MASK else d.embedding[token]
    state = torch.stack([first, *[mask] * (steps - from_anchor)])
    rows = len(state)
    positions = torch.arange(anchor + rows)
    frequencies = 1 / (100.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))  # rounded as transformers rounds
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]

    def rope(x: torch.Tensor, at: slice) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos[at] - b * sin[at], b * cos[at] + a * sin[at]], dim=-1)

    hidden = torch.zeros(rows, len(context) + rows, dtype=torch.bool)
    if d.config.causal:
        hidden[:, len(context) :] = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    if d.config.sliding_window:
        hidden[:, : max(0, len(context) - d.config.sliding_window)] = True
    for index in range(d.config.num_layers):
        layer = f"layers.{index}."

        def heads(x: torch.Tensor, name: str, of: str = layer) -> torch.Tensor:
            found = (x @ weights[f"{of}self_attn.{name}_proj.weight"].T).unflatten(1, (-1, HEAD_DIM))
            return found if name == "v" else rms(found, weights[f"{of}self_attn.{name}_norm.weight"])

        x = rms(state, weights[layer + "input_layernorm.weight"])
        q = rope(heads(x, "q"), slice(len(context), None))
        k, v = (torch.cat([heads(context, name), heads(x, name)]) for name in "kv")
        k = rope(k, slice(None))
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = q[:, head] @ k[:, group].T / math.sqrt(HEAD_DIM)
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, group])
        state = state + torch.cat(mixed, dim=-1) @ weights[layer + "self_attn.o_proj.weight"].T
        y = rms(state, weights[layer + "post_attention_layernorm.weight"])
        gate, up, down = (weights[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        state = state + (F.silu(y @ gate) * (y @ up)) @ down
    return rms(state[not from_anchor :], weights["norm.weight"]) @ weights["lm_head.weight"].T


DOCUMENTS = [make_sequence(9, 4, 1), make_sequence(34, 6, 2), make_sequence(6, 2, 3)]


def logits_of(drafter: DFlashDrafter, batch: Batch, *, steps: int) -> torch.Tensor:
    """[Q, steps, V]"""
    return torch.stack([drafter.lm_head(step.normed) for step in drafter.chain(batch, steps=steps)], dim=1)


def compare_with_plain(drafter: DFlashDrafter, right: DFlashDrafter, *, steps: int = STEPS) -> None:
    """Logits, and gradients of a random function of them; `right` is the same drafter without the fault that may be planted in the first."""
    documents = [*DOCUMENTS, replace(DOCUMENTS[0], token_ids=torch.full_like(DOCUMENTS[0].token_ids, MASK))]
    batch = pack(documents, steps=steps)
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    weights = {name: value.detach().clone().requires_grad_() for name, value in right.state_dict().items()}
    found = logits_of(drafter, batch, steps=steps)
    places = zip(batch.documents[rows].tolist(), batch.positions[rows].tolist(), strict=True)
    expected = torch.stack([plain_block(right, documents[d], p, weights, steps=steps) for d, p in places])
    assert len(rows) > 30
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    picks = torch.randn_like(found)
    (found * picks).sum().backward()
    (expected * picks).sum().backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [STEPS, 2])
@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 1}, {"num_layers": 3, "causal": True}, {"sliding_window": 4, "causal": True}]
)
@pytest.mark.parametrize("attention", ["tiles", "flex"])
def test_packed_blocks_equal_a_forward_pass_over_each(
    changes: dict, steps: int, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several tiles, or by flex attention."""
    if attention == "flex":
        use_flex(monkeypatch)
    monkeypatch.setattr(tiles, "_QUERIES_IN_BLOCK", 20)
    compare_with_plain(make_drafter(**changes), make_drafter(**changes), steps=steps)


def predicts_from_anchor(_: DFlashDrafter, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DFlashConfig, "known_rows", 0)


def mask_is_the_token_s(drafter: DFlashDrafter, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafter, "learns_mask", False)


NORMS = (
    "hidden_norm",
    "norm",
    *(
        f"layers.{index}.{name}"
        for index in range(2)
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    ),
)
FAULTS_OF_BLOCKS: dict[str, Fault] = {
    **{f"without {norm}": without(norm) for norm in NORMS},
    "norm of another layer": as_in("layers.1.self_attn.k_norm", "layers.0.self_attn.k_norm"),
    "positions late": late(1),
    "positions early": late(-1),
    "context of a row more": sees(dflash, further=1),
    "context of a row less": sees(dflash, further=-1),
    "context of other documents": sees(dflash, other_documents=True),
    "causal": other_config(causal=True),
    "another mask token": other_config(mask_token_id=MASK + 1),
    "anchor a token late": reads_next_token("block"),
}
"""In the module that DSpark has in common."""
FAULTS = FAULTS_OF_BLOCKS | {
    "predicts from the anchor's row": predicts_from_anchor,
    "mask is not learned": mask_is_the_token_s,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_would_notice(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter()
    assert norms_of(drafter) == set(NORMS)
    FAULTS[fault](drafter, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_plain(drafter, make_drafter())


def test_a_block_depends_on_nothing_later_and_on_no_other_document() -> None:
    drafter, at = make_drafter(), 9

    def drafts(documents: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = pack(documents, steps=STEPS)
        rows = batch.loss_weights.sum(1).nonzero()[:, 0]
        return batch.documents[rows], batch.positions[rows], logits_of(drafter, batch, steps=STEPS)

    document, position, before = drafts(DOCUMENTS)
    states, tokens = DOCUMENTS[1].hidden_states.clone(), DOCUMENTS[1].token_ids.clone()
    states[at] += 1
    tokens[at + 1] = (tokens[at + 1] + 1) % VOCAB
    # Row `at` has the token after it as its anchor, and its own state as the last of its context.
    _, _, after = drafts([DOCUMENTS[0], replace(DOCUMENTS[1], hidden_states=states, token_ids=tokens), DOCUMENTS[2]])
    changed = (before != after).flatten(1).any(1)
    assert changed.tolist() == ((document == 1) & (position >= at)).tolist()


@pytest.mark.parametrize("causal", [False, True])
def test_draft_tokens_depend_on_how_many_there_are(causal: bool) -> None:
    drafter, batch = make_drafter(causal=causal), pack(DOCUMENTS, steps=STEPS)
    whole = torch.stack([step.normed for step in drafter.chain(batch, steps=STEPS)], dim=1)
    rows = [batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0] for steps in (STEPS, 2)]
    part = torch.stack([step.normed for step in drafter.chain(batch, steps=2)], dim=1)
    apart = (whole[torch.isin(*rows), :2] - part).abs().amax(-1)
    assert drafter.depends_on_k is not causal
    if causal:
        assert apart.max() < 1e-9
    else:
        assert apart.min() > 1e-4


def test_what_is_predicted_for_a_k_is_drafted_with_it() -> None:
    """Greedy, and at a temperature that is nearly greedy: counts of blocks of K + 1 rows, walked as serving walks."""
    drafter = make_drafter()
    ids = drafter.draft_token_ids
    documents = [replace(make_sequence(60, 8, i), token_ids=ids[torch.randint(0, 3, (60,))].int()) for i in range(4)]
    batch = pack(documents, steps=STEPS).with_layers([0, 1, 2], 2)
    counts = count_accepted(drafter, [batch], k=STEPS)
    others = {}
    for k in range(1, STEPS + 1):
        accepted = drafts = of_longest = 0
        rows = batch.loss_weights[:, :k].sum(1).nonzero()[:, 0]
        choices = ids[logits_of(drafter, batch, steps=k).argmax(-1)]
        right = ((choices == batch.next_tokens[rows, 1 : k + 1]) & (batch.loss_weights[rows, :k] > 0)).int()
        longest = ids[logits_of(drafter, batch, steps=STEPS).argmax(-1)][
            torch.isin(batch.loss_weights.sum(1).nonzero()[:, 0], rows), :k
        ]
        of_longest = int((longest != choices).sum())
        for document in range(len(documents)):
            here = (batch.documents[rows] == document) & (batch.loss_weights[rows, 0] > 0)
            hits = [*walk(right[here].cumprod(1).sum(1).tolist())]
            accepted, drafts = accepted + sum(hits), drafts + len(hits)
        assert counts[k] == (accepted, drafts)
        others[k] = of_longest
    assert counts[STEPS][0] > 5
    assert others[1] > 0, "with blocks of one size for every K this test would pass too"
    head = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64)
    same = predict_sampled_acceptance(
        drafter, [batch], k=2, sampling=Sampling(temperature=1.0), norm=nn.Identity(), head=head
    )
    # A target that knows nothing accepts the most likely draft token with probability 1 / VOCAB.
    assert same.greedy_drafts[1] == pytest.approx(1 + 1 / VOCAB)


def test_anchors() -> None:
    """So many that each response token is trained on `passes` times, in every document, each with a block; drawn anew each time."""
    options = DFlashOptions(block_size=BLOCK, passes=1.0)
    batch = pack([make_sequence(41, 9, 1), make_sequence(14, 7, 2)], steps=STEPS)
    lengths, generator = [40, 13], torch.Generator().manual_seed(0)
    several = []
    for _ in range(40):
        parts = [DFlashDrafter.trained_rows(options, part, generator) for part in batch.loss_weights.split(lengths)]
        several.append([part.any(1).nonzero()[:, 0].tolist() for part in parts])
        for part, whole in zip(parts, batch.loss_weights.split(lengths), strict=True):
            chosen = part.any(1)
            assert torch.equal(part[chosen], whole[chosen]), "blocks are trained whole"
    # Anchors x_9 ... x_39, with x_10 ... x_40 after them; row p has the anchor x_{p+1}.
    assert {row for long, _ in several for row in long} == {*range(8, 39)}
    assert {row for _, short in several for row in short} == {*range(6, 12)}
    assert {(len(long), len(short)) for long, short in several} == {(math.ceil(31 / STEPS), math.ceil(6 / STEPS))}
    assert len({tuple(long) for long, _ in several}) > 30
    every = DFlashDrafter.trained_rows(DFlashOptions(block_size=BLOCK, passes=99), batch.loss_weights[:40], generator)
    assert every.any(1).sum() == 31
    nothing = torch.zeros(5, STEPS)
    assert torch.equal(DFlashDrafter.trained_rows(options, nothing, generator), nothing)


def plain_loss(
    drafter: DFlashDrafter, batch: Batch, alpha: float | None, decay: float, head: torch.Tensor | None = None
) -> torch.Tensor:
    """The loss by its formulas, block by block; with the target's head [V, H] against its distribution."""
    assert batch.last_states is not None
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    log_q = logits_of(drafter, batch, steps=STEPS).log_softmax(-1)
    ids, terms = drafter.draft_token_ids.tolist(), []
    for place, row in enumerate(rows.tolist()):
        tokens = batch.next_tokens[row, 1:].tolist()
        weights = [float(w) if t in ids else 0.0 for w, t in zip(batch.loss_weights[row], tokens, strict=True)]
        found = [log_q[place, k, ids.index(t)] if weights[k] else None for k, t in enumerate(tokens)]
        reached, gate = [], 1.0
        for one in found:
            gate *= (alpha or 0) + (1 - (alpha or 0)) * (0.0 if one is None else float(one.detach().exp()))
            reached.append(gate if one is not None else 0.0)
        for k, one in enumerate(found):
            if one is not None:
                by_k = decay**k if alpha is None else sum(reached[k:])
                if head is not None:
                    one = (head @ batch.last_states[row + 1 + k]).softmax(-1) @ log_q[place, k]
                terms.append((k, weights[k], -one * weights[k] * by_k))
    return sum(
        sum(loss for at, _, loss in terms if at == k) / max(1, sum(w for at, w, _ in terms if at == k))
        for k in range(STEPS)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("targets", ["tokens", "distribution"])
@pytest.mark.parametrize("alpha", [0.5, 0.0, None])
def test_loss(alpha: float | None, targets: Literal["tokens", "distribution"]) -> None:
    """Values, gradients and counts, with tokens outside the draft vocabulary and prompts that weigh less."""
    drafter = make_drafter()
    head = torch.randn(DRAFT, HIDDEN, dtype=torch.float64)
    batch = pack(DOCUMENTS, steps=STEPS, prompt_weight=0.3).with_layers([0, 1, 2], 2)
    batch = replace(batch, loss_weights=batch.loss_weights * (torch.arange(len(batch.positions)) % 2)[:, None])

    loss = BlockLoss(
        drafter,
        teacher_norm=nn.Identity(),
        teacher_head=head,
        ttt_steps=STEPS,
        ttt_loss_decay=0.8,
        terms=LossTerms(targets=targets, in_blocks=True, acceptance_alpha=alpha),
    )
    output = loss(batch)
    expected = plain_loss(drafter, batch, alpha, 0.8, head if targets == "distribution" else None)
    torch.testing.assert_close(output.loss, expected, rtol=1e-9, atol=1e-9)
    parameters = list(drafter.parameters())
    found, wanted = (torch.autograd.grad(value, parameters, retain_graph=True) for value in (output.loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    known = torch.isin(batch.next_tokens[rows, 1:], drafter.draft_token_ids)
    torch.testing.assert_close(loss.weights(batch), (batch.loss_weights[rows] * known).double().sum(0))
    hits = drafter.draft_token_ids[logits_of(drafter, batch, steps=STEPS).argmax(-1)] == batch.next_tokens[rows, 1:]
    share = (hits * batch.loss_weights[rows]).sum(0) / batch.loss_weights.sum(0)
    torch.testing.assert_close(output.matches, share.double())
    # Twice the divisors, half the loss.
    torch.testing.assert_close(loss(batch, 2 * loss.weights(batch)).loss, expected / 2, rtol=1e-9, atol=1e-9)


MANY = 400
"""Size of a draft vocabulary that the loss takes subsets of."""


def compare_subset_with_whole(loss: BlockLoss, batch: Batch) -> None:
    """The mean of loss and gradient over many draws of half of the draft vocabulary's tokens, and what a draw leaves out."""
    batch = replace(batch, loss_weights=batch.loss_weights * (torch.arange(len(batch.positions)) % 4 == 0)[:, None])
    head = loss.drafter.lm_head.weight
    with torch.no_grad():  # both distributions are flat, so that the tokens that are left out have a share
        head.mul_(0.1)
        loss.teacher_head.mul_(0.1)
    losses, gradients = [], []
    for size, draws in ((None, 1), (MANY // 2, 16)):
        loss.loss_vocab_size = size
        found, gradient = 0.0, torch.zeros_like(head)
        for draw in range(draws):
            torch.manual_seed(draw)
            value = loss(batch).loss
            (one,) = torch.autograd.grad(value, head)
            assert int(one.any(1).sum()) == (size or MANY), "a token that was not drawn has no gradient"
            found, gradient = found + value.item() / draws, gradient + one / draws
        losses.append(found)
        gradients.append(gradient)
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert F.cosine_similarity(gradients[0].flatten(), gradients[1].flatten(), dim=0) > 0.8
    assert 0.8 < gradients[1].norm() / gradients[0].norm() < 1.2


@pytest.mark.parametrize("targets", ["tokens", "distribution"])
@pytest.mark.parametrize("alpha", [0.0, None])
def test_a_subset_estimates_the_whole(alpha: float | None, targets: Literal["tokens", "distribution"]) -> None:
    drafter = make_drafter(vocab_size=MANY, draft_vocab_size=MANY)
    drafter.draft_token_ids = torch.arange(MANY)
    loss = BlockLoss(
        drafter,
        teacher_norm=nn.Identity(),
        teacher_head=torch.randn(MANY, HIDDEN, dtype=torch.float64),
        ttt_steps=STEPS,
        ttt_loss_decay=0.8,
        terms=LossTerms(targets=targets, in_blocks=True, acceptance_alpha=alpha),
    )
    compare_subset_with_whole(loss, pack(DOCUMENTS, steps=STEPS).with_layers([0, 1, 2], 2))


@pytest.mark.parametrize("name", ["cross_entropy", "kl", "total_variation"])
def test_distances_to_the_targets_distribution(name: LossName) -> None:
    drafter = make_drafter()
    head = torch.randn(DRAFT, HIDDEN, dtype=torch.float64)
    batch = pack(DOCUMENTS, steps=STEPS).with_layers([0, 1, 2], 2)
    loss = BlockLoss(
        drafter,
        teacher_norm=nn.Identity(),
        teacher_head=head,
        ttt_steps=STEPS,
        ttt_loss_decay=0.8,
        loss=name,
        terms=LossTerms(in_blocks=True),
    )
    assert batch.last_states is not None
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    log_q = logits_of(drafter, batch, steps=STEPS).log_softmax(-1)
    p = F.linear(batch.last_states[(rows[:, None] + 1 + torch.arange(STEPS)).clamp(max=len(batch.positions) - 1)], head)
    p = p.softmax(-1)
    apart = {
        "cross_entropy": -(p * log_q).sum(-1),
        "kl": (p * (p.log() - log_q)).sum(-1),
        "total_variation": (p - log_q.exp()).abs().sum(-1) / 2,
    }[name]
    known = torch.isin(batch.next_tokens[rows, 1:], drafter.draft_token_ids) * batch.loss_weights[rows]
    expected = ((apart * known).sum(0) / known.sum(0) * 0.8 ** torch.arange(STEPS).double()).sum()
    found = loss(batch).loss
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    parameters = list(drafter.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), rtol=1e-8, atol=1e-8
    )


@torch.no_grad()
def test_heads_start_by_attending_to_a_distance_each() -> None:
    """Given inputs with something in common, each head of a group mixes the values of one row, a fixed number of positions back."""
    size, hidden, rows, steps = 32, 24, 40, 4
    torch.manual_seed(0)
    drafter = make_drafter(
        num_layers=1, head_dim=size, num_attention_heads=6, num_key_value_heads=2, block_size=steps + 1
    ).float()
    layer = drafter.decoder_layers()[0].self_attn
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        projection.reset_parameters()
    constant = torch.zeros(hidden)
    constant[0] = 1
    context, blocks = torch.randn(rows, hidden), torch.randn(steps + 1, hidden)
    context[:, 0], blocks[:, 0] = 1, 1
    _attend_to_distances(layer, constant, drafter.inverse_frequencies(), first=2)
    keys, _ = layer.keys_values(context, drafter._rope(torch.arange(rows), context))
    at = torch.arange(rows, rows + steps + 1)
    own = layer.keys_values(blocks, drafter._rope(at, blocks))
    queries = layer.queries(blocks, drafter._rope(at, blocks))
    keys = torch.cat([keys, own[0]])
    for head in range(6):
        scores = (queries[:, head] @ keys[:, head // 3].T / math.sqrt(size)).softmax(-1)
        assert scores.argmax(-1).tolist() == (at - (2 + head % 3)).tolist(), head
        assert scores.max(-1).values.min() > 0.8


def test_an_untrained_drafter_drafts_as_a_linear_one_does(tmp_path: Path) -> None:
    """Its first draft token is right far more often than without the start of its layers, on texts that it was not fitted on."""
    from accelerate import Accelerator

    from draftsmith.store.reader import Store
    from draftsmith.target.tensors import load_target_tensors
    from draftsmith.train.data import TrainingData

    make_run(tmp_path, sequences=120)
    about, tensors = describe_target(tmp_path / "target"), load_target_tensors(tmp_path / "target")
    for layers in (1, 2):
        options = DFlashOptions(block_size=3, num_layers=layers, draft_vocab_size=None)
        config = DFlashDrafter.make_config(options, about, (1, 2, 3), 80)
        torch.manual_seed(0)
        drafter = DFlashDrafter.from_target(config, tensors, torch.arange(80))
        recipe = make_recipe(tmp_path, drafter=options.model_dump())
        data = TrainingData(recipe, Accelerator(cpu=True), Store(tmp_path / "run" / "store"), [0, 1, 2], 2, 2)
        drafter.init_from_target(tensors, data)
        accepted, drafts = count_accepted(drafter, data.held_out(steps=2), k=1)[1]
        for layer in drafter.decoder_layers():
            layer.self_attn.o_proj.weight.data.zero_()
        without, _ = count_accepted(drafter, data.held_out(steps=2), k=1)[1]
        assert drafts > 100
        assert accepted / drafts > without / drafts + 0.2, layers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a converted drafter."""
    drafter = {"kind": "dflash", "block_size": 4, "draft_vocab_size": 60}
    return make_converted(tmp_path_factory.mktemp("dflash"), drafter, epochs=0.3)


def test_what_vllm_loads(trained: Path) -> None:
    """vllm/model_executor/models/qwen3_dflash.py reads the config by these keys, and the mask from a file."""
    folder = trained / "vllm"
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"], config["block_size"]) == (["DFlashDraftModel"], "qwen3", 4)
    assert config["dflash_config"] == {
        "mask_token_id": 79,
        "target_layer_ids": [0, 1, 2],
        "causal": False,
        "use_aux_hidden_state": True,
        "sample_from_anchor": False,
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    mask = torch.load(folder / "mask_embedding.pt", weights_only=True)
    found = Checkpoint.load(trained / "checkpoint")
    assert mask["mask_token_id"] == 79
    assert torch.equal(mask["embedding"], found.tensors["mask_embedding"])
    assert mask["embedding"].abs().min() > 0
    again = read(folder, Found("vllm", "dflash", ""))
    assert again.config == found.config
    assert all(torch.equal(again.tensors[name], value) for name, value in found.tensors.items())


def test_a_recipe_is_the_same_as_before_masks_could_stay(tmp_path: Path) -> None:
    """An option at its default is no input, so that finished trainings stay finished."""
    inputs = [
        make_recipe(tmp_path, drafter={"kind": "dflash", **each}).train.inputs()["drafter"]
        for each in ({}, {"train_mask_embedding": True}, {"train_mask_embedding": False})
    ]
    assert "train_mask_embedding" not in inputs[0]
    assert inputs[0] == inputs[1]
    assert inputs[2] == inputs[0] | {"train_mask_embedding": False}


def test_it_is_served_with_no_more_tokens_than_were_trained(trained: Path) -> None:
    folder = trained / "vllm"
    assert speculative_config(folder, 3) == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
    with pytest.raises(UserError, match=r"at most 3 tokens, and 4 were requested.*train\.drafter\.block_size"):
        speculative_config(folder, 4)
    assert own_drafter(folder).method == "dflash"
    assert drafts_fixed_k(own_drafter(folder))
    card = (folder / "README.md").read_text()
    assert '"method": "dflash"' in card
    assert "all layers after the first with the first layer's weights" in card


def test_the_mask_s_file_belongs_to_the_drafter(trained: Path, tmp_path: Path) -> None:
    """It is hashed and published; without it the directory is damaged, since vLLM would take another mask without a word."""
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("store"))
    folder = tmp_path / "run" / "vllm"
    assert inspect(folder)["good"]
    before = drafter_sha256(folder)
    files = {"config.json", "model.safetensors", "mask_embedding.pt"}
    assert set(before) == files
    assert set(publish(tmp_path / "run", "me/drafter", evaluation=None, dry_run=True)["files"]) == files | {"README.md"}
    (folder / "mask_embedding.pt").write_bytes(b"other")
    assert drafter_sha256(folder) != before
    (folder / "mask_embedding.pt").unlink()
    found = inspect(folder)
    assert not found["good"]
    assert "mask_embedding.pt is missing" in found["damage"]["message"]
    with pytest.raises(UserError, match=r"mask_embedding\.pt is missing"):
        drafter_sha256(folder)


def test_a_mask_that_vllm_would_not_take_is_refused(trained: Path, tmp_path: Path) -> None:
    """vLLM passes over the tensor, and without the file takes the embedding of the mask's token (qwen3_dflash.py, `load_weights`). A folder
    with neither, as others publish it, is meant so."""
    folder = tmp_path / "theirs"
    shutil.copytree(trained / "vllm", folder)
    (folder / "mask_embedding.pt").unlink()
    with pytest.raises(
        UserError, match=r"theirs has no mask_embedding\.pt, from which alone vLLM takes `mask_embedding`"
    ):
        speculative_config(folder, 3)
    convert_checkpoint(folder, tmp_path / "mended", to="vllm")
    assert speculative_config(tmp_path / "mended", 3)
    masks = [
        torch.load(path / "mask_embedding.pt", weights_only=True) for path in (trained / "vllm", tmp_path / "mended")
    ]
    assert torch.equal(masks[0]["embedding"], masks[1]["embedding"])
    weights = load_file(folder / "model.safetensors")
    del weights["mask_embedding"]
    save_file(weights, folder / "model.safetensors")
    assert speculative_config(folder, 3)["model"] == str(folder)


def test_two_masks_that_differ_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(trained / "vllm", folder)
    found, file = Found("vllm", "dflash", ""), folder / "mask_embedding.pt"
    mask = torch.load(file, weights_only=True)["embedding"]
    torch.save(mask.bfloat16(), file)
    assert torch.equal(read(folder, found).tensors["mask_embedding"], mask), "one is the other in fewer bits"
    torch.save(mask.double(), file)
    assert torch.equal(read(folder, found).tensors["mask_embedding"], mask)
    torch.save(mask * 1.01, file)
    with pytest.raises(
        UserError, match=r"theirs, read as vllm \(dflash\): Its mask is in mask_embedding\.pt, .* the two differ"
    ):
        read(folder, found)


def drop(path: str) -> Callable[[dict], None]:
    section, _, name = path.rpartition(".")
    return lambda config: (config[section] if section else config).pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("dflash_config.mask_token_id"), r"`mask_token_id` is \(`dflash_config.mask_token_id`\)"),
        (drop("block_size"), "`block_size`"),
        (lambda config: config["dflash_config"].update(sample_from_anchor=True), "sample_from_anchor.*only False"),
        (lambda config: config["dflash_config"].update(use_swa=True), "dflash_config.use_swa"),
        (lambda config: (drop("eagle_aux_hidden_state_layer_ids")(config), drop("dflash_config.target_layer_ids")(config)), "target_layer_ids"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_read(
    trained: Path, tmp_path: Path, change: Callable[[dict], None], message: str
) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((trained / "vllm" / file).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        read(tmp_path, Found("vllm", "dflash", ""))


def test_ids_of_layers_outputs_are_read(trained: Path, tmp_path: Path) -> None:
    """As the authors publish: output i is what enters layer i + 1."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((trained / "vllm" / file).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    drop("eagle_aux_hidden_state_layer_ids")(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tuple(read(tmp_path, Found("vllm", "dflash", "")).config["layer_ids"]) == (1, 2, 3)


def test_a_mask_token_that_the_target_lacks(tmp_path: Path) -> None:
    make_run(tmp_path)
    target = describe_target(tmp_path / "target")
    with pytest.raises(UserError, match=r"`train\.drafter\.mask_token_id` is 80, and .* has 80 tokens"):
        DFlashDrafter.make_config(DFlashOptions(mask_token_id=80), target, (1, 2, 3), 80)
