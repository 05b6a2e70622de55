"""Parts of training: steps, learning rate, predicted acceptance, least squares, and the conversion of the result."""

import ctypes
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.eagle3 import _attend_to_own_position, _FusedStates
from draftsmith.drafters.init import induction, least_squares
from draftsmith.drafters.init.least_squares import RIDGE, factor, reduced_rank_fit, solve, unit_rms
from draftsmith.drafters.vocabulary import choose_draft_vocabulary
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.target.tensors import TargetTensors
from draftsmith.train.acceptance import predict_acceptance, walk
from draftsmith.train.optimizers import learning_rate_factor
from draftsmith.train.packing import balance_tokens, pack, pack_epoch
from tests.unit.converting import to_vllm
from tests.unit.test_eagle3 import DRAFT, HIDDEN, VOCAB, make_drafter, make_sequence


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 120), st.integers(0, 5), st.integers(0, 3))
def test_every_sequence_once_within_the_budget(lengths: list[int], budget: int, seed: int, epoch: int) -> None:
    steps = pack_epoch(lengths, tokens_per_step=budget, seed=seed, epoch=epoch)
    assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
    assert all(len(step) == 1 or sum(lengths[i] for i in step) <= budget for step in steps)
    assert steps == pack_epoch(lengths, tokens_per_step=budget, seed=seed, epoch=epoch)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 8))
def test_shares_of_a_step_are_balanced(lengths: list[int], count: int) -> None:
    shares = balance_tokens(lengths, count)
    assert len(shares) == count
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths), "a share that leads by more than one sequence would not have got it"
    assert balance_tokens(lengths, 1) == [list(range(len(lengths)))]


def test_learning_rate() -> None:
    factors = [learning_rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == factors[10] == 1
    assert factors[11:] == sorted(factors[11:], reverse=True)
    assert 0 < factors[-1] < 0.01


def test_walk_advances_by_accepted_tokens() -> None:
    # The token of row 0 comes from prefill. From row 1 two draft tokens are accepted and the target adds one: on to row 4.
    assert list(walk([9, 2, 8, 8, 0, 0, 1, 8])) == [2, 0, 0, 1]
    assert list(walk([0, 1, 5, 0])) == [1, 0]
    assert list(walk([3])) == []


def test_predicted_acceptance_of_a_drafter_that_is_always_right() -> None:
    drafter = make_drafter(draft_vocab_size=VOCAB)
    drafter.draft_token_ids = torch.arange(VOCAB)
    sequence = make_sequence(30, 4, 1)
    with torch.no_grad():
        drafter.lm_head.weight.zero_()  # the argmax of equal logits is token 0
    zeros = replace(sequence, token_ids=torch.zeros(30, dtype=torch.int32))
    # 26 response tokens, the first from prefill: 25 rows to draft from. K = 1: 12 drafts gain two tokens each, and a last one,
    # from row 25, gains one. K = 3: drafts from rows 1, 5, ... 21 have three tokens accepted, from row 25 one: the text ends.
    found = predict_acceptance(drafter, [pack([zeros], steps=3)], k=3)
    assert found[1] == pytest.approx(1 + 13 / 13)
    assert found[3] == pytest.approx(1 + (6 * 3 + 1) / 7)


def test_predicted_acceptance_walks_each_answer_of_a_conversation() -> None:
    drafter = make_drafter(draft_vocab_size=VOCAB)
    drafter.draft_token_ids = torch.arange(VOCAB)
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
    places = torch.arange(30)
    answers = ((places >= 4) & (places < 13)) | (places >= 20)  # of 9 and of 10 tokens
    zeros = replace(make_sequence(30, 4, 1), token_ids=torch.zeros(30, dtype=torch.int32), loss_mask=answers)
    # K = 3: in the first answer three each from its tokens 2 and 6, which end it; in the second three, three and one.
    assert predict_acceptance(drafter, [pack([zeros], steps=3)], k=3)[3] == pytest.approx(1 + (6 + 7) / (2 + 3))


def test_draft_vocabulary() -> None:
    counts = torch.tensor([0, 5, 0, 9, 5, 0])
    assert choose_draft_vocabulary(counts, 2).tolist() == [1, 3]
    assert choose_draft_vocabulary(counts, 4).tolist() == [0, 1, 3, 4]
    assert choose_draft_vocabulary(counts, None).tolist() == list(range(6))


def test_the_ridge_grows_with_rounding_errors() -> None:
    """A Gram matrix whose lowest eigenvalue is below zero by more than the ridge, as rounding makes it for 40,000 columns."""
    vectors = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    for lowest, ridge in ((0.0, RIDGE), (-2 * RIDGE, 10 * RIDGE), (-20 * RIDGE, 100 * RIDGE)):
        values = torch.ones(20, dtype=torch.float64)
        values[0] = lowest
        gram = vectors * values @ vectors.T
        mean = gram.diagonal().mean()
        lower = factor(gram.clone())
        torch.testing.assert_close(lower @ lower.T, gram + ridge * mean * torch.eye(20, dtype=torch.float64))
        wanted = torch.ones(20, 2, dtype=torch.float64)
        torch.testing.assert_close((gram + ridge * mean * torch.eye(20)) @ solve(lower, wanted), wanted)
    with pytest.raises(DraftsmithError, match="some are not finite"):
        factor(torch.full((3, 3), torch.nan))


def test_initialization_does_not_depend_on_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the order of sums."""
    torch.manual_seed(0)
    embedding, head = torch.randn(VOCAB, HIDDEN).double(), torch.randn(VOCAB, HIDDEN).double()
    tensors = TargetTensors(embedding, head, torch.ones(HIDDEN))
    batches = [pack([make_sequence(40, 5, n)], steps=1).with_layers([0, 1, 2], 2) for n in range(8)]
    whole, pieces = make_drafter(), make_drafter()
    whole.init_from_target(tensors, batches)
    for module in (induction, least_squares):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    pieces.init_from_target(tensors, batches)
    batch = batches[0]
    for found, expected in zip(pieces.chain(batch, steps=1), whole.chain(batch, steps=1), strict=True):
        torch.testing.assert_close(found.normed, expected.normed)


def test_reduced_rank_fit_recovers_what_is_there() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b, c = random(10, 6), random(6, 2), random(2, 6)
    reads = random(4000, 16)
    wanted = reads[:, :10] @ a + reads[:, 10:] @ b @ c + 0.01 * random(4000, 6)
    found_a, found_b, found_c = reduced_rank_fit(reads.T @ reads, reads.T @ wanted, rank=2)
    assert found_b.shape == (6, 2)
    torch.testing.assert_close(found_a, a, rtol=0, atol=0.05)
    torch.testing.assert_close(found_b @ found_c, b @ c, rtol=0, atol=0.05)


def test_first_heads_attend_to_their_own_position() -> None:
    drafter = make_drafter(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, head_dim=16, max_position_embeddings=512
    )
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(400, HIDDEN, generator=generator, dtype=torch.float64) * 0.3 + 1.0  # with a common component
    with torch.no_grad():
        drafter.layers[0].hidden_norm.weight.fill_(1)
        unit = unit_rms(states)
        _attend_to_own_position(drafter, _FusedStates(torch.ones(()), unit.T @ unit, unit.sum(0)))
        x = torch.cat([torch.randn(400, HIDDEN, dtype=torch.float64), drafter.layers[0].hidden_norm(states)], dim=1)
        attention = drafter.layers[0].self_attn
        rope = drafter._rope(torch.arange(400), states)
        q, (k, _) = attention.queries(x, rope), attention.keys_values(x, rope)
    scores = torch.einsum("qc,kc->qk", q[:, 0], k[:, 0]) / 4
    weights = scores.masked_fill(torch.ones(400, 400).triu(1).bool(), -torch.inf).softmax(-1)
    assert weights.diagonal().median() > 0.5, "most of the attention is on the row itself, even at position 400"


def test_conversion_is_closed() -> None:
    drafter = make_drafter()
    checkpoint = Checkpoint(
        "eagle3", drafter.config.to_dict(), {"name": "t"}, drafter.draft_token_ids, in_memory(drafter.state_dict())
    )
    config, tensors = to_vllm(checkpoint, "float32")
    assert torch.equal(torch.arange(DRAFT) + tensors["d2t"], drafter.draft_token_ids)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == drafter.draft_token_ids.tolist()
    assert set(tensors) - {"d2t", "t2d"} == set(drafter.state_dict())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    for change in ({"extra.weight": torch.ones(1)}, {"norm.weight": torch.ones(HIDDEN + 1)}):
        with pytest.raises(DraftsmithError, match="not those of the config"):
            to_vllm(replace(checkpoint, weights=in_memory({**checkpoint.tensors, **change})), "float32")
    missing = {name: value for name, value in checkpoint.tensors.items() if name != "fc.weight"}
    with pytest.raises(DraftsmithError, match=r"fc\.weight"):
        to_vllm(replace(checkpoint, weights=in_memory(missing)), "float32")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc 2.33 and later counts so")
def test_freed_memory_is_kept() -> None:
    """Tensors of 24 MiB are allocated on the heap, which does not shrink when they are freed."""
    code = """
import ctypes, sys, torch
from draftsmith.run.process import disable_malloc_trim
if sys.argv[1] == "keep":
    disable_malloc_trim()
class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd d e f g h".split()]
counts = ctypes.CDLL(None).mallinfo2
counts.restype = Counts
before = counts().hblkhd
tensors = [torch.ones(6 << 20) for _ in range(8)]
mapped, heap = counts().hblkhd - before, counts().arena
del tensors
print(mapped >> 20, (heap - counts().arena) >> 20)
"""
    how = [sys.executable, "-c", code]
    kept, default = (subprocess.run([*how, w], capture_output=True, text=True, check=True) for w in ("keep", "default"))
    assert kept.stdout.split() == ["0", "0"]
    assert default.stdout.split()[0] != "0", "or this shows nothing"
