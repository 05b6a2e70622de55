"""What training does on a drafter's device works on one that is not the CPU, and comes to the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.drafters.base import Drafter
from draftsmith.store import Sequence
from draftsmith.train.acceptance import predict_acceptance, predict_sampled_acceptance
from draftsmith.train.loss import ChainLoss
from draftsmith.train.packing import pack
from tests.unit.another_device import GPU, on_gpu, with_gpu
from tests.unit.test_plan import KINDS, _tiny

HIDDEN, VOCAB = 32, 80


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with with_gpu():
        here, there = torch.ones(3, 3), torch.ones(3, 3, device=GPU)
        assert there.device == GPU
        assert (there @ here.to(GPU)).device == GPU
        assert (there @ there).cpu().tolist() == [[3.0] * 3] * 3
        for mixed in (
            lambda: here @ there, lambda: there + here, lambda: here[there.long()[0]], lambda: torch.cat([here, there])
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="tensors on the CPU and on a GPU"):
                mixed()
        there[torch.tensor([0, 2])] = 5.0  # indices may be on the CPU
        there[1] = here[0]  # and a copy goes from one to the other
        assert there.cpu()[:, 0].tolist() == [5.0, 1.0, 5.0]


def _sequences(layers: int) -> list[Sequence]:
    return [
        Sequence(i, False, torch.randint(0, VOCAB, (30,)), torch.arange(30) >= 10, torch.randn(29, layers, HIDDEN))
        for i in range(6)
    ]


def _parts(name: str) -> tuple[Drafter, Any, list[Sequence], nn.RMSNorm]:
    torch.manual_seed(0)
    drafter, _ = _tiny(name, **KINDS[name])
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.2)
    embedding, head = torch.randn(2, VOCAB, HIDDEN)
    tensors = SimpleNamespace(embedding=embedding, lm_head=head, final_norm_weight=torch.ones(HIDDEN))
    return drafter, tensors, _sequences(len(drafter.config.layer_ids)), nn.RMSNorm(HIDDEN).requires_grad_(False)


def _loss(drafter: Drafter, norm: nn.RMSNorm, head: torch.Tensor, **options: Any) -> ChainLoss:
    steps = drafter.max_steps or 2
    return ChainLoss(drafter, teacher_norm=norm, teacher_head=head, chain_steps=steps, chain_decay=0.8, **options)


@pytest.mark.parametrize("name", KINDS)
def test_the_start(name: str) -> None:
    drafter, tensors, sequences, _ = _parts(name)
    steps = drafter.max_steps or 1
    batches = [(pack([one], steps=steps), one.hidden_states[:, -1]) for one in sequences]
    other, *_ = _parts(name)
    drafter.start(tensors, batches)
    with with_gpu():
        on_gpu(other).start(tensors, [(batch.to(GPU), states.to(GPU)) for batch, states in batches])
    for key, value in other.state_dict().items():
        assert value.device == GPU
        torch.testing.assert_close(value.on_cpu, drafter.state_dict()[key])


@pytest.mark.parametrize("name", KINDS)
def test_loss_and_prediction(name: str) -> None:
    """The loss over a part of the vocabulary, which the drafter and the teacher choose."""
    drafter, tensors, sequences, norm = _parts(name)
    other, _, _, other_norm = _parts(name)
    steps = drafter.max_steps or 2
    batch, last = pack(sequences, steps=steps), torch.cat([one.hidden_states[:, -1] for one in sequences])
    torch.manual_seed(1)
    with torch.no_grad():
        expected_loss = _loss(drafter, norm, tensors.lm_head, loss_vocab_size=48)(batch, last).loss
    with with_gpu():
        torch.manual_seed(1)
        on_gpu(other)  # as in training, where the start needs it there
        loss = on_gpu(_loss(other, other_norm, tensors.lm_head, loss_vocab_size=48))
        found_loss = loss(batch.to(GPU), last.to(GPU)).loss
        assert found_loss.device == GPU
        torch.testing.assert_close(found_loss.cpu(), expected_loss)

    columns = [*range(len(drafter.config.layer_ids))]
    expected = predict_acceptance(drafter, sequences, columns, k=steps)
    sampled = predict_sampled_acceptance(
        drafter, sequences, columns, k=steps, temperature=0.8, last_column=columns[-1], norm=norm, head=tensors.lm_head
    )
    with with_gpu():
        assert predict_acceptance(other, sequences, columns, k=steps) == expected
        found = predict_sampled_acceptance(
            other, sequences, columns, k=steps, temperature=0.8, last_column=columns[-1], norm=other_norm,
            head=tensors.lm_head.to(GPU),
        )  # fmt: skip
    assert found.sampled_drafts == pytest.approx(sampled.sampled_drafts, rel=1e-4)
