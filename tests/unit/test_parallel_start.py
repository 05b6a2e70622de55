"""P-EAGLE's start: later draft tokens by linear prediction from the last real position."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.drafters.init import parallel
from draftsmith.drafters.p_eagle import PEagleConfig, PEagleDrafter
from draftsmith.store.format import Sequence
from draftsmith.target.tensors import TargetTensors
from draftsmith.train.packing import pack

HIDDEN, HEAD_DIM, VOCAB, DEPTHS = 192, 64, 61, 4


def make_drafter(embedding: torch.Tensor, *, heads: int = 6, kv_heads: int = 2, layers: int = 2) -> PEagleDrafter:
    config = PEagleConfig(
        layer_ids=(1, 2, 3),
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=64,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        norm_before_residual=False,
        fc_norm=True,
        norm_output=False,
        num_depths=DEPTHS,
        mask_token_id=0,
    )
    torch.manual_seed(0)
    return PEagleDrafter(config, embedding, torch.arange(VOCAB))


def texts(tensors: Any, count: int, seed: int) -> list[Batch]:
    """Every token decides on the next one. The target's states encode the token, its last state the next one."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = [int(torch.randint(VOCAB, (1,), generator=generator))]
        while len(ids) < 40:
            ids.append((7 * ids[-1] + 5) % VOCAB)
        tokens = torch.tensor(ids)
        states = torch.stack([tensors.embedding[tokens[:-1]]] * 2 + [tensors.lm_head[tokens[1:]]], dim=1)
        states = states + 0.1 * torch.randn(states.shape, generator=generator) + 0.5
        sequence = Sequence(number, False, tokens, torch.arange(len(tokens)) > 0, states)
        made.append(pack([sequence], steps=DEPTHS).with_layers([0, 1, 2], 2))
    return made


@pytest.fixture(scope="module")
def tensors() -> Any:
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    return TargetTensors(embedding, head, torch.ones(HIDDEN))


def right_by_slot(drafter: PEagleDrafter, batches: list[Batch]) -> list[float]:
    right: list[list[torch.Tensor]] = [[] for _ in range(DEPTHS)]
    with torch.no_grad():
        for batch in batches:
            rows = batch.loss_weights.sum(1).nonzero()[:, 0]
            for slot, step in enumerate(drafter.chain(batch, steps=DEPTHS)):
                hit = F.linear(step.normed, step.head).argmax(-1) == batch.next_tokens[rows, slot + 1]
                right[slot].append(hit[step.loss_weights > 0])
    return [torch.cat(one).float().mean().item() for one in right]


@pytest.mark.parametrize("shape", [(6, 2), (4, 2), (3, 3)], ids=["three a group", "two a group", "one a group"])
def test_second_and_third_token_follow_from_the_last_position(tensors: Any, shape: tuple[int, int]) -> None:
    """Untrained, where each state is a linear function of the one before, about as often as the first token does. The tokens after those
    are not fitted."""
    known, unseen = texts(tensors, 60, seed=2), texts(tensors, 10, seed=3)
    drafter = make_drafter(tensors.embedding, heads=shape[0], kv_heads=shape[1])
    drafter.init_from_target(tensors, known)
    first, second, third, _ = right_by_slot(drafter, unseen)
    assert first > 0.7
    assert second > 0.8 * first
    assert third > 0.7 * first  # one a group: 64 values stand for two maps of rank 61


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(6, 2), (3, 3)], ids=["three a group", "one a group"])
def test_on_any_processor(tensors: Any, shape: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of directions that matter equally little, libraries of linear algebra return any basis; the slots' direction was one of it."""
    eigh, generator = torch.linalg.eigh, torch.Generator().manual_seed(seed)

    def of_another(matrix: torch.Tensor) -> Any:
        values, vectors = eigh(matrix)
        equal = int((values < 1e-5 * values[-1]).sum())
        rotation = torch.linalg.qr(torch.randn(equal, equal, generator=generator)).Q
        vectors[:, :equal] = vectors[:, :equal] @ rotation
        return torch.return_types.linalg_eigh((values, vectors))

    with monkeypatch.context() as patch:
        patch.setattr(parallel.torch.linalg, "eigh", of_another)
        drafter = make_drafter(tensors.embedding, heads=shape[0], kv_heads=shape[1])
        drafter.init_from_target(tensors, texts(tensors, 60, seed=2))
    first, second, third, _ = right_by_slot(drafter, texts(tensors, 10, seed=3))
    assert min(second, third) > 0.9 * first


@torch.no_grad()
def test_the_first_token_stays_as_it_is(tensors: Any) -> None:
    """Three heads cancel at real positions."""
    known = texts(tensors, 20, seed=2)
    drafter, plain = make_drafter(tensors.embedding), make_drafter(tensors.embedding)
    drafter.init_from_target(tensors, known)
    Eagle3Drafter.init_from_target(plain, tensors, known)
    assert drafter.decoder_layers()[1].self_attn.o_proj.weight.any()
    for batch in known[:3]:
        found, expected = (next(iter(one.chain(batch, steps=2))).normed for one in (drafter, plain))
        assert (found - expected).abs().mean() < 0.03  # their RMS is one


@pytest.mark.parametrize("fault", ["nowhere", "near"])
def test_a_slot_that_looks_elsewhere_is_noticed(tensors: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that prefer the position two before the last, or none."""
    fitted = parallel._fit_scores

    def elsewhere(frequencies: torch.Tensor, *wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if fault == "near":
            return fitted(frequencies, *(one.roll(2) for one in wanted))
        return torch.zeros_like(frequencies), torch.zeros_like(frequencies)

    monkeypatch.setattr(parallel, "_fit_scores", elsewhere)
    drafter = make_drafter(tensors.embedding)
    drafter.init_from_target(tensors, texts(tensors, 60, seed=2))
    assert min(right_by_slot(drafter, texts(tensors, 10, seed=3))[1:3]) < 0.5


def test_with_one_layer_slots_read_the_mean(tensors: Any) -> None:
    known = texts(tensors, 8, seed=2)
    drafter = make_drafter(tensors.embedding, layers=1)
    drafter.init_from_target(tensors, known)
    normed = torch.cat([drafter.normed_states(batch.hidden_states) for batch in known])
    torch.testing.assert_close(drafter.mask_hidden[0, 0], normed.mean(0))
