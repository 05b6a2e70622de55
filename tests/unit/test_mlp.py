"""MLP speculator: steps against the paper's formulas, initialization, and the published layout."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.layout import Source
from draftsmith.drafters.mlp_speculator import PUBLISHED, MlpConfig, MlpDrafter, MlpOptions
from draftsmith.drafters.norm import FinalNorm
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.store.format import Sequence
from draftsmith.target.tensors import TargetTensors
from draftsmith.train.packing import pack
from tests.unit.converting import to_vllm
from tests.unit.test_medusa import HIDDEN, VOCAB, backpropagated_loss, make_sequence

STEPS = 3


def make_drafter(**changes: object) -> MlpDrafter:
    fields: dict = {
        "layer_ids": (5,), "hidden_size": HIDDEN, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
        "inner_size": 10, "n_predict": STEPS, "tie_weights": False, "scale_input": True,
    }  # fmt: skip
    torch.manual_seed(0)
    drafter = MlpDrafter(MlpConfig(**fields | changes), FinalNorm(torch.rand(HIDDEN) + 0.5, eps=1e-5)).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return drafter


def plain_logits(
    weights: dict[str, torch.Tensor], config: MlpConfig, norm: torch.Tensor, h: torch.Tensor, tokens: list[int]
) -> list[torch.Tensor]:
    """Logits [V] of one step per token of `tokens`, by the formulas."""
    state_weight = 0.5 ** (0.5 / config.n_predict)
    token_weight = ((1 - state_weight**2) * config.inner_size / 2) ** 0.5
    s = h / (h.pow(2).mean() + config.rms_norm_eps).sqrt() * norm
    if config.scale_input:
        s = s / (s.pow(2).mean() + 1e-6).sqrt() / 2**0.5
    logits = []
    for i, token in enumerate(tokens):
        j, p = (0, min(i, 1)) if config.tie_weights else (i, i)
        z = weights[f"proj.{p}.weight"] @ s + token_weight / state_weight * weights[f"emb.{j}.weight"][token]
        z = z / (z.pow(2).mean() + 1e-6).sqrt() * weights[f"ln.{j}.weight"] + weights[f"ln.{j}.bias"]
        s = z * 0.5 * (1 + torch.erf(z / 2**0.5))
        logits.append(weights[f"head.{j}.weight"] @ s)
    return logits


@pytest.mark.parametrize(
    "changes", [{}, {"tie_weights": True}, {"scale_input": False, "inner_size": 16}, {"n_predict": 1}]
)
def test_loss_and_gradients_equal_the_formulas(changes: dict) -> None:
    """Outputs, the published loss (a plain sum of token cross-entropies) and every gradient, float64, 1e-9."""
    drafter = make_drafter(**changes)
    steps = drafter.config.n_predict
    documents = [make_sequence(9, 4, 1), make_sequence(14, 6, 2)]
    found = backpropagated_loss(drafter, documents, MlpOptions(), steps=steps, decay=1.0)

    weights = {name: value.detach().clone().requires_grad_() for name, value in drafter.state_dict().items()}
    each: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    for document in documents:
        tokens = document.token_ids.tolist()
        for p, h in enumerate(document.hidden_states[:, 0]):
            reads = tokens[p + 1 : p + 1 + steps]
            for i, logits in enumerate(plain_logits(weights, drafter.config, drafter.final_norm.weight, h, reads)):
                if p + 2 + i < len(tokens) and document.loss_mask[p + 2 + i]:
                    each[i].append(torch.logsumexp(logits, 0) - logits[tokens[p + 2 + i]])
    expected = torch.stack([torch.stack(step).mean() for step in each]).sum()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9)


def test_autoregressive_steps_read_draft_tokens() -> None:
    drafter = make_drafter()
    batch = pack([make_sequence(12, 3, 1)], steps=STEPS)
    with torch.no_grad():
        steps = list(drafter.chain(batch, steps=STEPS, autoregressive=True))
        draft_tokens = [(step.normed @ step.head.T).argmax(-1) for step in steps]
        rows = batch.loss_weights.sum(1).nonzero()[:, 0]
        for q, row in enumerate(rows.tolist()):
            reads = [int(batch.next_tokens[row, 0]), *(int(drafted[q]) for drafted in draft_tokens)][:STEPS]
            wanted = plain_logits(
                dict(drafter.state_dict()),
                drafter.config,
                drafter.final_norm.weight,
                batch.hidden_states[row, 0],
                reads,
            )
            assert [int(logits.argmax()) for logits in wanted] == [int(drafted[q]) for drafted in draft_tokens]


@pytest.mark.parametrize("inner_size", [HIDDEN, 8, 20])
def test_initialization_is_better_than_chance(inner_size: int) -> None:
    """On a text in which every token follows from the last state, the untrained drafter is far better than a random one."""
    assert untrained_share(inner_size) > 4 / VOCAB, "chance is 1 / VOCAB"


def test_a_narrow_start_keeps_the_directions_that_tell_tokens_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those in which the head varies least."""
    scales = torch.logspace(-1.5, 0, HIDDEN, dtype=torch.float64)
    kept, eigh = untrained_share(8, scales), torch.linalg.eigh

    def ascending(matrix: torch.Tensor) -> Any:
        return SimpleNamespace(eigenvectors=eigh(matrix).eigenvectors.flip(1))

    monkeypatch.setattr(torch.linalg, "eigh", ascending)
    assert kept > 2 * untrained_share(8, scales)


def untrained_share(inner_size: int, scales: torch.Tensor | float = 1.0) -> float:
    """Share of draft tokens that an untrained drafter has right there. `scales`: of the head's columns."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64) * scales
    turn = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)).Q
    states = [torch.randn(HIDDEN, generator=generator, dtype=torch.float64)]
    for _ in range(119):
        states.append(turn @ states[-1])
    ids = torch.cat([torch.zeros(1, dtype=torch.long), (torch.stack(states) @ head.T).argmax(-1)])
    batch = pack([Sequence(1, False, ids, torch.ones(121, dtype=torch.bool), torch.stack(states)[:, None])], steps=1)
    drafter = make_drafter(inner_size=inner_size, tie_weights=True)
    for ln in drafter.ln:
        torch.nn.init.ones_(ln.weight)
        torch.nn.init.zeros_(ln.bias)
    drafter.final_norm.weight.fill_(1)
    torch.nn.init.zeros_(drafter.emb[0].weight)
    drafter.init_from_target(TargetTensors(head, head, torch.ones(HIDDEN)), [batch.with_layers([0], 0)])
    with torch.no_grad():
        (step,) = drafter.chain(batch, steps=1)
    draft_tokens = (step.normed @ step.head.T).argmax(-1)
    return float((draft_tokens == batch.next_tokens[: len(draft_tokens), 1]).double().mean())


def test_published_layout_and_closed_conversion() -> None:
    drafter = make_drafter(tie_weights=True)
    tensors = drafter.state_dict()
    checkpoint = Checkpoint(
        "mlp_speculator", drafter.config.to_dict(), {"name": "t"}, drafter.draft_token_ids, in_memory(tensors)
    )
    config, found = to_vllm(checkpoint, "float64", "ibm")
    parts = ("emb.{}.weight", "head.{}.weight", "proj.{}.weight", "ln.{}.weight", "ln.{}.bias")
    assert set(found) == {f"speculator.{part.format(i)}" for part in parts for i in range(STEPS)}
    assert torch.equal(found["speculator.proj.2.weight"], tensors["proj.1.weight"])
    assert torch.equal(found["speculator.head.2.weight"], tensors["head.0.weight"])
    assert (config["emb_dim"], config["inner_dim"], config["n_predict"]) == (HIDDEN, 10, STEPS)
    with pytest.raises(DraftsmithError, match="not those of the config"):
        to_vllm(
            replace(checkpoint, weights=in_memory(tensors | {"proj.2.weight": torch.ones(10, 10)})), "float32", "ibm"
        )


@pytest.mark.parametrize("change", [{"inner_dim": 0}, {"inner_dim": None}, {"inner_dim": HIDDEN}])
def test_without_an_inner_size_it_is_the_hidden_size(change: dict) -> None:
    drafter = make_drafter()
    record = PUBLISHED.write(drafter.config) | change
    assert PUBLISHED.read(Source(record, {}))["inner_size"] == HIDDEN
