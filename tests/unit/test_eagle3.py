"""EAGLE-3: the packed chain against the formulas, and what packing weights."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from draftsmith.drafters import tiles
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.store.format import Sequence
from draftsmith.train.packing import pack
from tests.unit.flex_on_cpu import use_flex

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT = 24, 4, 2, 6, 40, 30


def make_drafter(**changes: object) -> Eagle3Drafter:
    fields: dict = {
        "layer_ids": (1, 2, 3), "hidden_size": HIDDEN, "intermediate_size": 20, "num_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "max_position_embeddings": 64,
        "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "norm_before_residual": False, "fc_norm": True, "norm_output": False,
    }  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randperm(VOCAB)[:DRAFT].sort().values
    drafter = Eagle3Drafter(Eagle3Config(**fields | changes), torch.randn(VOCAB, HIDDEN), ids).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def make_sequence(tokens: int, prompt: int, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    return Sequence(
        sample_id=seed,
        held_out=False,
        token_ids=torch.randint(0, VOCAB, (tokens,), generator=generator),
        loss_mask=torch.arange(tokens) >= prompt,
        hidden_states=torch.randn(tokens - 1, 3, HIDDEN, generator=generator, dtype=torch.float64),
    )


def plain_chain(
    d: Eagle3Drafter, sequence: Sequence, p: int, steps: int, weights: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Logits [V] of each chain step from position p, one token at a time, by the formulas."""
    config = d.config

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def rope(x: torch.Tensor, position: int) -> torch.Tensor:
        half = HEAD_DIM // 2
        frequencies = 1 / (100.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))  # rounded as transformers rounds
        angle = position * frequencies
        cos, sin = angle.cos().double(), angle.sin().double()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    layer = "layers.0."

    def project(name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
        projected = weights[f"{layer}self_attn.{name}.weight"] @ x
        if config.attention_bias:
            projected = projected + weights[f"{layer}self_attn.{name}.bias"]
        projected = projected.view(heads, HEAD_DIM)
        if config.qk_norm and name != "v_proj":
            projected = rms(projected, f"{layer}self_attn.{name[0]}_norm.weight")
        return projected

    def inputs(state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        normed = rms(state, layer + "hidden_norm.weight")
        x = torch.cat([rms(d.embedding[token], layer + "input_layernorm.weight"), normed])
        return x, normed if config.norm_before_residual else state

    def fused(q: int) -> torch.Tensor:
        states = sequence.hidden_states[q]
        if config.norm_before_fc:
            states = rms(states.flatten(), "input_norm.weight").view_as(states)
        if config.fc_norm:
            states = torch.stack([rms(states[i], f"fc_norm.{i}.weight") for i in range(3)])
        return weights["fc.weight"] @ states.flatten()

    tokens = sequence.token_ids.tolist()
    keys, values = [], []
    for q in range(max(0, p + 1 - (config.sliding_window or p + 1)), p + 1):
        x, _ = inputs(fused(q), tokens[q + 1])
        keys.append(rope(project("k_proj", x, KV_HEADS), q))
        values.append(project("v_proj", x, KV_HEADS))
    state, logits = fused(p), []
    for k in range(steps):
        x, residual = inputs(state, tokens[p + 1 + k])
        if k > 0:
            keys.append(rope(project("k_proj", x, KV_HEADS), p + k))
            values.append(project("v_proj", x, KV_HEADS))
        query = rope(project("q_proj", x, HEADS), p + k)
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = torch.stack([query[head] @ key[group] for key in keys]) / math.sqrt(HEAD_DIM)
            mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        state = residual + weights[layer + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = rms(state, layer + "post_attention_layernorm.weight")
        gate, up, down = (weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        state = state + down @ (F.silu(gate @ y) * (up @ y))
        normed = rms(state, "norm.weight")
        logits.append(weights["lm_head.weight"] @ normed)
        if config.norm_output:
            state = normed
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"norm_before_residual": True}, {"fc_norm": False}, {"norm_output": True}, {"attention_bias": True},
        {"fc_norm": False, "norm_before_fc": True}, {"target_hidden_size": 10},
        {"sliding_window": 4, "qk_norm": True},
    ],
)  # fmt: skip
@pytest.mark.parametrize("attention", ["tiles", "small tiles", "flex"])
def test_packed_chain_equals_the_formulas(changes: dict, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, and gradients of a random function of them."""
    if attention == "flex":
        use_flex(monkeypatch)
    if attention == "small tiles":  # every document in several blocks, several blocks in a tile, scores recomputed
        monkeypatch.setattr(tiles, "_QUERIES_IN_BLOCK", 3)
        monkeypatch.setattr(tiles, "_SCORES_KEPT", 0)
        monkeypatch.setattr(tiles, "_AREA_OVER_NEEDED", 1.5)
    drafter = make_drafter(**changes)
    documents = [make_sequence(9, 4, 1), make_sequence(14, 6, 2), make_sequence(6, 2, 3)]
    if width := changes.get("target_hidden_size"):
        documents = [replace(one, hidden_states=one.hidden_states[..., :width]) for one in documents]
    steps = 3
    batch = pack(documents, steps=steps)
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    weights = {name: value.detach().clone().requires_grad_() for name, value in drafter.state_dict().items()}
    found = [drafter.lm_head(step.normed) for step in drafter.chain(batch, steps=steps)]
    picks = [torch.randn(*logits.shape, dtype=torch.float64) for logits in found]
    total, plain_total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    compared = 0
    for q, row in enumerate(rows.tolist()):
        document, p = int(batch.documents[row]), int(batch.positions[row])
        expected = plain_chain(drafter, documents[document], p, int((batch.loss_weights[row] > 0).sum()), weights)
        for k, logits in enumerate(expected):
            torch.testing.assert_close(found[k][q], logits, rtol=1e-9, atol=1e-9)
            total = total + (found[k][q] * picks[k][q]).sum()
            plain_total = plain_total + (logits * picks[k][q]).sum()
            compared += 1
    assert compared == int((batch.loss_weights > 0).sum()) > 30
    total.backward()
    plain_total.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9)


def test_loss_weights() -> None:
    """The first response token has a weight at step 0 of the row two before it; nothing past the end has any."""
    batch = pack([make_sequence(7, 3, 1)], steps=2)
    assert batch.loss_weights.tolist() == [[0, 1], [1, 1], [1, 1], [1, 1], [1, 0], [0, 0]]
    tokens = make_sequence(7, 3, 1).token_ids.tolist()
    assert batch.next_tokens[1].tolist() == tokens[2:5]
    assert batch.next_tokens[5].tolist() == [tokens[6], 0, 0]


def test_two_layers_run_every_row() -> None:
    """With two layers, rows that nothing is predicted from still give the second layer keys."""
    drafter = make_drafter(num_layers=2)
    sequence = make_sequence(12, 6, 1)
    everything = Sequence(1, False, sequence.token_ids, torch.ones(12, dtype=torch.bool), sequence.hidden_states)
    with torch.no_grad():
        some = next(iter(drafter.chain(pack([sequence], steps=1), steps=1))).normed
        every = next(iter(drafter.chain(pack([everything], steps=1), steps=1))).normed
    torch.testing.assert_close(some, every[-len(some) :], rtol=1e-9, atol=1e-9)
