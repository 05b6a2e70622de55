"""Predicted acceptance: of packed sequences, at a temperature, and the speedup that follows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from draftsmith.config.sampling import Sampling
from draftsmith.drafters.batch import Batch
from draftsmith.store.format import Sequence
from draftsmith.train import packing
from draftsmith.train.acceptance import (
    _expected_walk,
    count_accepted,
    predict_acceptance,
    predict_sampled_acceptance,
    predicted_speedup,
    sampled_probabilities,
    walk,
)
from draftsmith.train.packing import pack, pack_in_order
from draftsmith.train.train import run_train
from tests.unit.test_eagle3 import HIDDEN, VOCAB, make_drafter, make_sequence
from tests.unit.tiny_run import make_recipe, make_run

K = 3


@pytest.fixture(scope="module")
def parts():  # type: ignore[no-untyped-def]
    """A drafter, five sequences, and the target's norm and head."""
    drafter = make_drafter()
    torch.manual_seed(5)
    norm = torch.nn.RMSNorm(HIDDEN, eps=1e-5).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    sequences = [make_sequence(20 + 3 * i, 4 + i, i) for i in range(5)]
    return drafter, sequences, norm.requires_grad_(False), torch.randn(VOCAB, HIDDEN, dtype=torch.float64)


def batches(sequences: list[Sequence]) -> list[Batch]:
    return [batch.with_layers([0, 1, 2], 2) for batch in pack_in_order(sequences, steps=K)]


def test_packing_changes_nothing(parts, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    drafter, sequences, norm, head = parts
    # Tokens of the draft vocabulary, so that some are accepted.
    ids = drafter.draft_token_ids
    sequences = [replace(s, token_ids=ids[s.token_ids.long() % 3].int()) for s in sequences]
    found = []
    for at_once in (4096, 60, 1):
        monkeypatch.setattr(packing, "_TOKENS_IN_BATCH", at_once)
        assert len(batches(sequences)) == {4096: 1, 60: 3, 1: 5}[at_once]
        found.append((
            predict_acceptance(drafter, batches(sequences), k=K),
            predict_sampled_acceptance(drafter, batches(sequences), k=K, sampling=Sampling(0.7), norm=norm, head=head),
        ))  # fmt: skip
    assert found[0][0] == found[1][0] == found[2][0]
    for _, at_temperature in found[1:]:
        assert at_temperature.greedy_drafts == pytest.approx(found[0][1].greedy_drafts, abs=1e-12)
        assert at_temperature.sampled_drafts == pytest.approx(found[0][1].sampled_drafts, abs=1e-12)


def test_states_of_any_dtype(parts) -> None:  # type: ignore[no-untyped-def]
    drafter, sequences, _, _ = parts
    halves = [replace(s, hidden_states=s.hidden_states.bfloat16()) for s in sequences]
    doubles = [replace(s, hidden_states=s.hidden_states.double()) for s in halves]
    assert predict_acceptance(drafter, batches(halves), k=K) == predict_acceptance(drafter, batches(doubles), k=K)


def test_probabilities_are_the_formulas(parts) -> None:  # type: ignore[no-untyped-def]
    """One sequence, K = 1: the expected walk with p(d) and with sum min(p, q), from whole distributions."""
    drafter, (sequence, *_), norm, head = parts
    found = predict_sampled_acceptance(drafter, batches([sequence]), k=1, sampling=Sampling(0.6), norm=norm, head=head)
    batch = pack([sequence], steps=1)
    (step,) = drafter.chain(batch, steps=1)
    rows = batch.loss_weights[:, 0].nonzero()[:, 0]
    p = (F.linear(norm(sequence.hidden_states[:, 2]), head) / 0.6).softmax(-1)[rows + 1]
    q = torch.zeros_like(p)
    q[:, drafter.draft_token_ids] = (drafter.lm_head(step.normed) / 0.6).softmax(-1)
    accepted = {
        "greedy_drafts": p[torch.arange(len(p)), q.argmax(-1)].tolist(),
        "sampled_drafts": p.minimum(q).sum(-1).tolist(),
    }
    for name, chances in accepted.items():
        visits = [0.0, 1.0] + [0.0] * len(chances)
        for place in range(1, len(chances)):
            visits[place + 1] += visits[place] * (1 - chances[place])
            visits[place + 2] += visits[place] * chances[place]
        drafts = visits[1 : len(chances)]
        length = 1 + sum(v * c for v, c in zip(drafts, chances[1:], strict=True)) / sum(drafts)
        assert getattr(found, name) == pytest.approx({1: length}, abs=1e-12)


def test_cold_sampling_is_greedy_decoding(parts) -> None:  # type: ignore[no-untyped-def]
    """On text that the target generated greedily, the lengths become those of `predict_acceptance`."""
    _, sequences, norm, head = parts
    drafter = make_drafter(draft_vocab_size=VOCAB)
    drafter.draft_token_ids = torch.arange(VOCAB)
    head = torch.cat([5 * head[:1], head[1:]])  # so that token 0 is frequent
    written = []
    for s in sequences:
        greedy = F.linear(norm(s.hidden_states[:, 2]), head).argmax(-1)  # at row t: the token at t + 1
        written.append(replace(s, token_ids=torch.cat([s.token_ids[:1], greedy.int()])))
    with torch.no_grad():
        drafter.lm_head.weight.zero_()  # it always drafts token 0, the first of equal logits
    cold = predict_sampled_acceptance(drafter, batches(written), k=K, sampling=Sampling(1e-4), norm=norm, head=head)
    greedy_lengths = predict_acceptance(drafter, batches(written), k=K)
    assert greedy_lengths[K] > 1
    assert cold.greedy_drafts == pytest.approx(greedy_lengths, abs=1e-6)


def test_sampled_text_tells_what_was_accepted(parts) -> None:  # type: ignore[no-untyped-def]
    """On text drawn with the very parameters, the expectation given the text is that of counting in it, with less noise; the product of
    probabilities is for other text."""
    _, sequences, norm, head = parts
    sampling = Sampling(0.8, top_p=0.95, top_k=40)
    drafter = make_drafter(draft_vocab_size=VOCAB)
    drafter.draft_token_ids = torch.arange(VOCAB)
    with torch.no_grad():
        drafter.lm_head.weight.zero_()  # it always drafts token 0, the first of equal logits
    head = torch.cat([2 * head[:1], head[1:] / 2])  # how likely token 0 is varies widely from place to place
    counted, expected = [], []
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        written = []
        for s in sequences:
            p = sampled_probabilities(F.linear(norm(s.hidden_states[:, 2]), head), sampling)
            tokens = torch.multinomial(p, 1, generator=draw)[:, 0]
            written.append(replace(s, token_ids=torch.cat([s.token_ids[:1], tokens.int()])))
        counted.append(predict_acceptance(drafter, batches(written), k=K)[K])
        found = predict_sampled_acceptance(
            drafter, batches(written), k=K, sampling=sampling, norm=norm, head=head, own_text=True
        )
        expected.append(found.greedy_drafts[K])
    counts, expectations = torch.tensor(counted), torch.tensor(expected)
    error = (counts - expectations).std() / len(counts) ** 0.5
    assert counts.mean() > 1.2
    assert abs(counts.mean() - expectations.mean()) < 4 * error
    assert expectations.std() < counts.std()


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(0.8, 0.9), Sampling(1.5, 0.6, 5), Sampling(1.0, 1.0, 3)])
def test_distributions_are_those_that_are_sampled_from(sampling: Sampling) -> None:
    """One token at a time, in words: the likeliest k, of these the likeliest whose probabilities reach top-p."""
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for row, found in zip(logits, sampled_probabilities(logits, sampling), strict=True):
        order = row.argsort(descending=True).tolist()[: sampling.top_k]
        p = (row[order] / sampling.temperature).softmax(0)
        kept, total = [], 0.0
        for token, probability in zip(order, p.tolist(), strict=True):
            if total < sampling.top_p:
                kept.append((token, probability))
            total += probability
        expected = torch.zeros(30, dtype=torch.float64)
        for token, probability in kept:
            expected[token] = probability / sum(one for _, one in kept)
        torch.testing.assert_close(found, expected)


def test_processes_that_share_the_text_predict_like_one(parts) -> None:  # type: ignore[no-untyped-def]
    drafter, sequences, _, _ = parts
    ids = drafter.draft_token_ids  # so that some are accepted
    sequences = [replace(s, token_ids=ids[s.token_ids.long() % 3].int()) for s in sequences]
    every_second = torch.tensor([*count_accepted(drafter, batches(sequences[::2]), k=K).values()])
    found = predict_acceptance(drafter, batches(sequences[1::2]), k=K, add_up=lambda counts: counts + every_second)
    assert found == predict_acceptance(drafter, batches(sequences), k=K)
    assert found[K] > 1


def test_expected_walk() -> None:
    # Half of the drafts from row 1 are accepted, leading to row 3 or row 2; row 3 is also reached from row 2.
    tokens, drafts = _expected_walk([[0.5]] * 4)
    assert drafts == pytest.approx(1 + 0.5 + 0.75)
    assert tokens == pytest.approx(drafts / 2)


@given(st.lists(st.integers(0, 4), max_size=30))
def test_the_expected_walk_of_certain_acceptance_is_the_walk(accepted: list[int]) -> None:
    steps = list(walk(accepted))
    chain = [[float(n < count) for n in range(4)] for count in accepted]
    assert _expected_walk(chain) == (sum(steps), len(steps))


def test_predictions_that_a_recipe_asks_for(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    recipe = make_recipe(
        tmp_path,
        drafter={"kind": "eagle3", "draft_vocab_size": 60},
        epochs=1,
        predict_temperature=0.8,
        predict_top_p=0.9,
        predict_positions=2,
        step_costs={1: 1.25, 4: 2.0},
        loss="total_variation",
    )
    figures = run_train(recipe, run_dir)
    assert figures["predicted_speedup"] == {
        "1": pytest.approx(figures["predicted_acceptance_length"]["1"] / 1.25, abs=1e-4)
    }
    found = json.loads((run_dir / "checkpoint" / "stage.json").read_text())["figures"]["predicted_at_temperature"]
    assert (found["temperature"], found["top_p"], found["top_k"]) == (0.8, 0.9, None)
    assert figures["text_sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": None}
    for lengths in (found["greedy_drafts"], found["sampled_drafts"]):
        assert 1 < lengths["1"] < lengths["2"] < 2
    assert predicted_speedup({1: 1.5, 2: 1.8}, {2: 1.2, 3: 1.4}) == {2: pytest.approx(1.5)}
