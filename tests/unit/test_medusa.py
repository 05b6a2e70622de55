"""Medusa: heads against the paper's formulas, initialization and conversion."""

from dataclasses import replace

import pytest
import torch

from draftsmith.config.drafters import DrafterOptions
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter, MedusaOptions
from draftsmith.drafters.norm import FinalNorm
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.store.format import Sequence
from draftsmith.target.tensors import TargetTensors
from draftsmith.train.loss import ChainLoss
from draftsmith.train.packing import pack
from tests.unit.converting import to_vllm

HIDDEN, VOCAB, HEADS = 12, 40, 3


def make_drafter(**changes: object) -> MedusaDrafter:
    fields: dict = {
        "layer_ids": (5,), "hidden_size": HIDDEN, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
        "num_heads": HEADS, "num_layers": 2, "bias": True, "shared_head": True,
    }  # fmt: skip
    torch.manual_seed(0)
    drafter = MedusaDrafter(MedusaConfig(**fields | changes), FinalNorm(torch.rand(HIDDEN) + 0.5, eps=1e-5)).double()
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


def backpropagated_loss(
    drafter: Drafter, documents: list[Sequence], options: DrafterOptions, *, steps: int, decay: float
) -> torch.Tensor:
    """The loss on some documents; its gradients are in the drafter's parameters."""
    loss = ChainLoss(
        drafter,
        teacher_norm=torch.nn.RMSNorm(HIDDEN, eps=1e-5).double(),
        teacher_head=torch.randn(VOCAB, HIDDEN, dtype=torch.float64),
        ttt_steps=steps,
        ttt_loss_decay=decay,
        terms=drafter.loss_terms(options),
    )
    found = loss(pack(documents, steps=steps).with_layers([0], 0)).loss
    found.backward()
    return found


def plain_logits(weights: dict[str, torch.Tensor], config: MedusaConfig, norm: torch.Tensor, h: torch.Tensor, i: int):  # type: ignore[no-untyped-def]
    """Logits [V] of head i for one state, by the formulas."""
    y = h / (h.pow(2).mean() + config.rms_norm_eps).sqrt() * norm
    for layer in range(config.num_layers):
        z = weights[f"blocks.{i}.layers.{layer}.weight"] @ y
        if config.bias:
            z = z + weights[f"blocks.{i}.layers.{layer}.bias"]
        y = y + z / (1 + (-z).exp())
    return weights[f"lm_heads.{0 if config.shared_head else i}.weight"] @ y


@pytest.mark.parametrize("changes", [{}, {"bias": False, "num_layers": 1}, {"shared_head": False}])
def test_loss_and_gradients_equal_the_formulas(changes: dict) -> None:
    """Outputs, the published loss (token cross-entropy, decayed by head) and every gradient, float64, 1e-9."""
    drafter = make_drafter(**changes)
    documents = [make_sequence(9, 4, 1), make_sequence(14, 6, 2)]
    found = backpropagated_loss(drafter, documents, MedusaOptions(), steps=HEADS, decay=0.8)

    weights = {name: value.detach().clone().requires_grad_() for name, value in drafter.state_dict().items()}
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(HEADS):
        each = []
        for document in documents:
            tokens = document.token_ids.tolist()
            for p, h in enumerate(document.hidden_states[:, 0]):
                target = p + 2 + i
                if target < len(tokens) and document.loss_mask[target]:
                    logits = plain_logits(weights, drafter.config, drafter.final_norm.weight, h, i)
                    each.append(torch.logsumexp(logits, 0) - logits[tokens[target]])
        expected = expected + 0.8**i * torch.stack(each).mean()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9)


def test_separate_heads_start_as_the_best_linear_prediction() -> None:
    """On a text whose states rotate by a fixed matrix, the untrained heads predict the tokens."""
    drafter = make_drafter(shared_head=False, num_layers=1)
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)).Q
    states = [torch.randn(HIDDEN, generator=generator, dtype=torch.float64)]
    drafter.final_norm.weight.fill_(1)
    for _ in range(60):
        states.append(turn @ states[-1])
    sequence = Sequence(
        1, False, torch.zeros(62, dtype=torch.int32), torch.ones(62, dtype=torch.bool), torch.stack(states)[:, None]
    )
    batch = pack([sequence], steps=HEADS)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    tensors = TargetTensors(head, head, torch.ones(HIDDEN))
    drafter.init_from_target(tensors, [batch.with_layers([0], 0)])
    with torch.no_grad():
        found = [step.normed @ step.head.T for step in drafter.chain(batch, steps=HEADS)]
    z = drafter.final_norm(torch.stack(states))
    for i, logits in enumerate(found):
        wanted = z[1 + i :] @ head.double().T
        rows = min(len(wanted), len(logits))
        assert (logits[:rows].argmax(-1) == wanted[:rows].argmax(-1)).double().mean() > 0.9


def test_conversion_is_closed() -> None:
    drafter = make_drafter()
    tensors = drafter.state_dict()
    checkpoint = Checkpoint(
        "medusa", drafter.config.to_dict(), {"name": "t"}, drafter.draft_token_ids, in_memory(tensors)
    )
    config, found = to_vllm(checkpoint, "float32")
    assert set(found) == set(tensors)
    assert (config["truncated_vocab_size"], config["vocab_size"], config["original_lm_head"]) == (VOCAB, VOCAB, True)
    with pytest.raises(DraftsmithError, match="not those of the config"):
        to_vllm(
            replace(checkpoint, weights=in_memory(tensors | {"lm_heads.1.weight": torch.ones(VOCAB, HIDDEN)})),
            "float32",
        )
