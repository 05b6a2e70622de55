"""Induction heads, EAGLE-3's and those of block drafters, copy what followed an earlier occurrence of the context."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from draftsmith.drafters import eagle3
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.dflash import DFlashConfig, DFlashDrafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.init import block_context, induction
from draftsmith.drafters.init.codes import canonical_codes, directions_by_importance
from draftsmith.drafters.init.least_squares import factor
from draftsmith.store.format import Sequence
from draftsmith.target.tensors import TargetTensors
from draftsmith.train.packing import pack

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 192, 4, 2, 64, 60
HALF = 24


def make_drafter(embedding: torch.Tensor, *, heads: int = HEADS, theta: float = 1e6) -> Eagle3Drafter:
    config = Eagle3Config(
        layer_ids=(1, 2, 3),
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=64,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        norm_before_residual=False,
        fc_norm=True,
        norm_output=False,
    )
    torch.manual_seed(0)
    return Eagle3Drafter(config, embedding, torch.arange(VOCAB))


def make_block_drafter(embedding: torch.Tensor, **changes: Any) -> DFlashDrafter:
    fields: dict[str, Any] = {
        "layer_ids": (1, 2, 3), "hidden_size": HIDDEN, "intermediate_size": 32, "num_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "max_position_embeddings": 64, "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB, "block_size": 2, "mask_token_id": VOCAB - 1,
    }  # fmt: skip
    torch.manual_seed(0)
    return DFlashDrafter(DFlashConfig(**fields | changes), embedding, torch.arange(VOCAB))


def texts(tensors: Any, count: int, seed: int, *, together: int = 1) -> list[Batch]:
    """Random tokens, twice; several texts a batch. The target's states encode the current token, and its last state the next one."""
    generator = torch.Generator().manual_seed(seed)
    made: list[tuple[Sequence, torch.Tensor]] = []
    for number in range(count):
        half = torch.randperm(VOCAB, generator=generator)[:HALF]
        ids = torch.cat([half, half])
        stands, next_ = tensors.embedding[ids[:-1]], tensors.lm_head[ids[1:]]
        states = torch.stack([stands, stands.roll(1, dims=1), next_], dim=1)
        states = states + 0.1 * torch.randn(states.shape, generator=generator) + 0.5
        made.append((Sequence(number, False, ids, torch.arange(len(ids)) > 0, states), next_))
    batches = []
    for first in range(0, count, together):
        sequences, last = zip(*made[first : first + together], strict=True)
        batches.append(replace(pack(sequences, steps=1), last_states=torch.cat(last)))
    return batches


def right_in_second_half(drafter: Drafter, batches: list[Batch]) -> float:
    """Share of right first draft tokens where the text repeats itself."""
    right = []
    for batch in batches:
        (step,) = drafter.chain(batch, steps=1)
        rows = batch.loss_weights[:, 0].nonzero()[:, 0]
        draft_tokens = F.linear(step.normed, step.head).argmax(-1)
        right.append((draft_tokens == batch.next_tokens[rows, 1])[rows >= HALF])
    return torch.cat(right).float().mean().item()


@pytest.fixture(scope="module")
def tensors() -> Any:
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    return TargetTensors(embedding, head, torch.ones(HIDDEN))


def test_repeated_text_is_drafted(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are random, one of 60: only copying can predict the one after the next."""
    known, unseen = texts(tensors, 100, seed=2), texts(tensors, 10, seed=3)
    drafter = make_drafter(tensors.embedding)
    drafter.init_from_target(tensors, known)
    assert right_in_second_half(drafter, unseen) > 0.25

    monkeypatch.setattr(eagle3, "fit_codes", lambda *_: None)
    linear = make_drafter(tensors.embedding)
    linear.init_from_target(tensors, known)
    assert right_in_second_half(linear, unseen) < 0.1


@pytest.mark.parametrize("changes", [{"heads": KV_HEADS}, {"theta": 10.0}], ids=["no free head", "no slow pair"])
def test_without_induction_heads(tensors: Any, changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The initialization is then the linear one."""
    known = texts(tensors, 8, seed=2)
    drafter, linear = (make_drafter(tensors.embedding, **changes) for _ in range(2))
    drafter.init_from_target(tensors, known)
    monkeypatch.setattr(eagle3, "fit_codes", lambda *_: None)
    linear.init_from_target(tensors, known)
    for name, value in linear.state_dict().items():
        assert torch.equal(value, drafter.state_dict()[name]), name


@pytest.mark.parametrize(
    "changes", [{}, {"num_key_value_heads": HEADS}, {"num_layers": 3}], ids=["", "ungrouped", "3 layers"]
)
def test_blocks_draft_repeated_text(tensors: Any, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block drafter's context holds no tokens, but what the target said at each position."""
    known, unseen = texts(tensors, 100, seed=2, together=25), texts(tensors, 10, seed=3)
    drafter = make_block_drafter(tensors.embedding, **changes)
    drafter.init_from_target(tensors, known)
    assert right_in_second_half(drafter, unseen) > 0.25

    monkeypatch.setattr(block_context, "components", lambda *_: 0)
    linear = make_block_drafter(tensors.embedding, **changes)
    linear.init_from_target(tensors, known)
    assert right_in_second_half(linear, unseen) < 0.1


@pytest.mark.parametrize("rows_at_once", [2048, 7])
def test_a_text_of_two_tokens_changes_no_codes(
    tensors: Any, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefilled, it has one state, which no other follows."""
    monkeypatch.setattr(induction, "ROWS_AT_ONCE", rows_at_once)
    drafter, batches = make_drafter(tensors.embedding), texts(tensors, 4, 1)
    last_states = batches[0].last_states
    assert last_states is not None
    short = replace(
        batches[0],
        hidden_states=batches[0].hidden_states[:1],
        next_tokens=batches[0].next_tokens[:1],
        loss_weights=torch.zeros(1, batches[0].loss_weights.shape[1]),
        positions=torch.zeros(1, dtype=torch.int64),
        documents=torch.zeros(1, dtype=torch.int64),
        last_states=last_states[:1],
    )
    alone, among = (induction.fit_codes(drafter, given, False) for given in (batches, [short, *batches]))
    assert alone is not None
    assert among is not None
    for name, expected in vars(alone).items():
        torch.testing.assert_close(vars(among)[name], expected)


def test_codes_are_what_two_sides_share() -> None:
    """Of a constant, two shared signals with noise on one side, and noise, the codes are the two signals, with their correlations."""
    generator = torch.Generator().manual_seed(0)
    rows = 20_000
    constant, shared = torch.ones(rows, 1), torch.randn(rows, 2, generator=generator)
    noise = torch.randn(rows, 9, generator=generator)
    seen = shared + noise[:, :2] * torch.tensor([0.5, 1.2])  # correlations 0.89 and 0.64
    x, y = torch.cat([constant, shared, noise[:, 2:6]], dim=1), torch.cat([seen, constant, noise[:, 6:]], dim=1)
    x = x @ torch.linalg.qr(torch.randn(7, 7, generator=generator)).Q
    of_x, of_y = factor(x.T @ x), factor(y.T @ y)
    left, right, correlations = canonical_codes(of_x, of_y, x.T @ y, size=2)
    left = x @ torch.linalg.solve_triangular(of_x.T, left, upper=True) * rows**0.5
    right = y @ torch.linalg.solve_triangular(of_y.T, right, upper=True) * rows**0.5
    torch.testing.assert_close(correlations, torch.tensor([0.64, 0.89]), atol=0.02, rtol=0)
    for codes, signals in ((left, shared.flip(1)), (right, seen.flip(1))):
        assert torch.corrcoef(torch.cat([codes, signals], dim=1).T)[:2, 2:].diagonal().abs().min() > 0.97
        torch.testing.assert_close(codes.pow(2).mean(0), torch.ones(2), atol=0.05, rtol=0)


def test_directions_that_can_be_spared() -> None:
    """The head does not tell the first direction, and states do not have the second; of the others it tells the last least."""
    head = torch.diag(torch.tensor([0.0, 1.0, 3.0, 2.0])).repeat(2, 1) * torch.tensor([1.0] * 4 + [-1.0] * 4)[:, None]
    covariance = torch.diag(torch.tensor([0.1, 0.0, 1.0, 1.0]))
    found = directions_by_importance(head, torch.ones(8), covariance)
    assert found.abs().argmax(0).tolist() == [0, 1, 3, 2]
