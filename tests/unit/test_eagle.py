"""EAGLE: chain, loss and gradients against the paper's formulas; noise, initialization and conversion."""

import math
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.eagle import EagleConfig, EagleDrafter, EagleOptions
from draftsmith.drafters.norm import FinalNorm
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.store.format import Sequence
from draftsmith.target.tensors import TargetTensors
from draftsmith.train.loss import ChainLoss
from draftsmith.train.packing import pack
from tests.unit.converting import to_vllm

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EPS = 12, 4, 2, 6, 40, 1e-5
Weights = dict[str, torch.Tensor]


def make_drafter(**changes: object) -> EagleDrafter:
    fields: dict = {
        "layer_ids": (5,), "hidden_size": HIDDEN, "intermediate_size": 20, "num_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "max_position_embeddings": 64,
        "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "noise": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    shared = torch.randn(VOCAB, HIDDEN), FinalNorm(torch.rand(HIDDEN) + 0.5, eps=EPS), torch.randn(VOCAB, HIDDEN)
    drafter = EagleDrafter(EagleConfig(**fields | changes), *shared).double()
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
        hidden_states=torch.randn(tokens - 1, 1, HIDDEN, generator=generator, dtype=torch.float64),
    )


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rope(x: torch.Tensor, position: int) -> torch.Tensor:
    frequencies = 1 / (100.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))  # rounded as transformers rounds
    cos, sin = (position * frequencies).cos().double(), (position * frequencies).sin().double()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def plain_chain(weights: Weights, d: EagleDrafter, sequence: Sequence, p: int, steps: int) -> list[torch.Tensor]:
    """The state [H] that each chain step from position p predicts, one token at a time, by the formulas."""
    tokens = sequence.token_ids.tolist()
    keys, values = [], []

    def project(name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
        projected = weights[f"layers.0.self_attn.{name}.weight"] @ x
        return (projected + weights.get(f"layers.0.self_attn.{name}.bias", 0)).view(heads, HEAD_DIM)

    def read(state: torch.Tensor, position: int) -> torch.Tensor:
        """The output of `fc`; its key and value are appended for attention."""
        x = weights["fc.weight"] @ torch.cat([d.embedding[tokens[position + 1]], state]) + weights.get("fc.bias", 0)
        keys.append(rope(project("k_proj", x, KV_HEADS), position))
        values.append(project("v_proj", x, KV_HEADS))
        return x

    for q in range(p):
        read(rms(sequence.hidden_states[q, 0], d.final_norm.weight), q)
    state, predicted = rms(sequence.hidden_states[p, 0], d.final_norm.weight), []
    for k in range(steps):
        x = read(state, p + k)
        query = rope(project("q_proj", x, HEADS), p + k)
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = torch.stack([query[head] @ key[group] for key in keys]) / math.sqrt(HEAD_DIM)
            mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        r = x + weights["layers.0.self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = rms(r, weights["layers.0.post_attention_layernorm.weight"])
        gate, up, down = (weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = gate @ y
        state = r + down @ (gated / (1 + (-gated).exp()) * (up @ y))
        predicted.append(state)
    return predicted


@pytest.mark.parametrize("changes", [{}, {"fc_bias": True, "attention_bias": True}])
def test_chain_loss_and_gradients_equal_the_formulas(changes: dict) -> None:
    """SmoothL1 on the state and a tenth of the soft cross-entropy, over three steps; float64, 1e-9."""
    drafter, steps = make_drafter(**changes), 3
    documents = [make_sequence(9, 4, 1), make_sequence(12, 6, 2)]
    batch = pack(documents, steps=steps).with_layers([0], 0)
    norm = torch.nn.RMSNorm(HIDDEN, eps=EPS).double()
    norm.weight.data.copy_(drafter.final_norm.weight)
    loss = ChainLoss(
        drafter,
        teacher_norm=norm,
        teacher_head=drafter.lm_head,
        ttt_steps=steps,
        ttt_loss_decay=0.8,
        terms=drafter.loss_terms(EagleOptions()),
    )
    found = loss(batch).loss
    found.backward()

    weights = {name: value.detach().clone().requires_grad_() for name, value in drafter.state_dict().items()}
    each: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    for document in documents:
        normed = rms(document.hidden_states[:, 0], drafter.final_norm.weight)
        last = len(document.token_ids) - 1
        for p in range(len(normed)):
            reached = min(steps, last - p - 1)
            for k, state in enumerate(plain_chain(weights, drafter, document, p, reached)):
                if document.loss_mask[p + 2 + k]:
                    z = normed[p + 1 + k]
                    apart = (state - z).abs()
                    feature = torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
                    token = -((drafter.lm_head @ z).softmax(0) * (drafter.lm_head @ state).log_softmax(0)).sum()
                    each[k].append(feature + 0.1 * token)
    expected = sum((0.8**k * torch.stack(step).mean() for k, step in enumerate(each)), start=torch.zeros(()))
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9)


def test_noise_is_as_published_and_only_in_training() -> None:
    noisy, quiet = make_drafter(noise=0.2), make_drafter()
    batch = pack([make_sequence(40, 4, 1), make_sequence(11, 4, 2)], steps=1)
    clean = quiet.first_state(batch)
    noise = (noisy.first_state(batch) - clean).abs()
    for rows, length in ((slice(0, 39), 39), (slice(39, 49), 10)):
        bound = 0.1 * 512 / length
        assert 0.9 * bound < noise[rows].max() <= bound
    assert torch.equal(noisy.eval().first_state(batch), clean)


def test_initialization_is_the_best_linear_prediction() -> None:
    drafter = make_drafter()
    generator = torch.Generator().manual_seed(0)
    sequence = make_sequence(300, 0, 1)
    from_token, from_state = (torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    states = [torch.randn(HIDDEN, generator=generator, dtype=torch.float64)]
    ids = sequence.token_ids
    drafter.final_norm.weight.fill_(1)
    for token in ids[1:-1].tolist():
        states.append(rms(from_token @ drafter.embedding[token] + from_state @ rms(states[-1], 1), 1))
    batch = pack([replace(sequence, hidden_states=torch.stack(states)[:, None])], steps=1)
    drafter.init_from_target(
        TargetTensors(drafter.embedding, drafter.lm_head, drafter.final_norm.weight), [batch.with_layers([0], 0)]
    )
    with torch.no_grad():
        (step,) = drafter.chain(batch, steps=1)
    expected = rms(torch.stack(states), 1)[1 : len(step.normed) + 1]
    left = (step.normed - expected).pow(2).mean() / expected.pow(2).mean()
    assert left < 0.3, "a linear prediction of a normed linear map"


def test_conversion_is_closed() -> None:
    drafter = make_drafter(num_layers=2)
    tensors = drafter.state_dict()
    checkpoint = Checkpoint(
        "eagle", drafter.config.to_dict(), {"name": "t"}, drafter.draft_token_ids, in_memory(tensors)
    )
    config, found = to_vllm(checkpoint, "float32")
    assert set(found) == set(tensors)
    assert not {"layers.0.input_layernorm.weight", "fc.bias", "lm_head.weight", "embed_tokens.weight"} & set(found)
    assert (config["architectures"], config["num_hidden_layers"]) == (["EagleLlamaForCausalLM"], 2)
    with pytest.raises(DraftsmithError, match="not those of the config"):
        to_vllm(replace(checkpoint, weights=in_memory(tensors | {"fc.bias": torch.ones(HIDDEN)})), "float32")
