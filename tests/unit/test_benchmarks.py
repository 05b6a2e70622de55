"""The logic of the benchmarks: bars and status, what a sweep takes, the parts of the held-out text, guesses of lookup."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.config.recipe import Recipe
from draftsmith.data.prompts import load_prompts
from draftsmith.drafters.medusa import MedusaDrafter
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from tests.benchmarks import bench_learn, references
from tests.benchmarks.__main__ import main
from tests.benchmarks.bench_blocks import figures_of
from tests.benchmarks.bench_lookup import Answer, speedup, walk
from tests.benchmarks.bench_train import step_of_kind
from tests.benchmarks.figures import figure, missed
from tests.benchmarks.peer_speculators import hand_over
from tests.benchmarks.references import REFERENCES
from tests.benchmarks.sweep import Outcome, best_of, interval_of_difference, kept, length
from tests.unit.tiny_run import make_recipe, make_run

FINE = figure([*np.array([3.0, 1.0, 2.0])], "ratio", "nothing", direction="higher", bar=2.0)
LATE = figure([2.0], "s", "nothing", direction="lower", bar=1.9)
KNOWN = figure([7.0], "MB/s", "nothing")


def test_a_figure_that_misses_its_bar_ends_with_status_1_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmarks = {"good": lambda: {"a.fine": FINE, "a.known": KNOWN}, "bad": lambda: {"b.late": LATE}}
    output = tmp_path / "bench" / "results.json"
    assert main(["good"], benchmarks, output) == 0
    assert "missed" not in capsys.readouterr().err
    assert main([], benchmarks, output) == 1
    said = capsys.readouterr().err
    assert "missed their bars: b.late" in said
    assert [line.split()[0] for line in said.splitlines() if line.startswith(("passed", "MISSED"))] == [
        "passed",
        "MISSED",
    ]
    assert main(["good"], benchmarks, output) == 0  # of what was measured now; the other's figures stay
    stored = json.loads(output.read_text())
    assert stored["b.late"] == LATE
    assert {name: entry["passed"] for name, entry in stored.items()} == {
        "a.fine": True,
        "a.known": None,
        "b.late": False,
    }
    with pytest.raises(UserError, match="nobody"):
        main(["nobody"], benchmarks, output)


@pytest.mark.parametrize(
    ("direction", "value", "passed"),
    [("higher", 2.0, True), ("higher", 1.9, False), ("lower", 2.0, True), ("lower", 2.1, False), ("higher", float("nan"), False), ("lower", float("nan"), False)],
)  # fmt: skip
def test_direction(direction, value: float, passed: bool) -> None:  # type: ignore[no-untyped-def]
    entry = figure([value], "s", "nothing", direction=direction, bar=2.0)
    assert entry["passed"] is passed
    assert missed({"one": entry}) == ([] if passed else ["one"])
    assert set(entry) == {"value", "unit", "runs", "against", "limit", "direction", "bar", "passed"}


def test_a_bar_needs_a_direction() -> None:
    with pytest.raises(ValueError, match="direction"):
        figure([1.0], "s", "nothing", bar=2.0)


def test_a_sweep_goes_on_where_the_best_is_at_an_edge() -> None:
    asked: list[int] = []

    def value(one: int) -> float:
        asked.append(one)
        return -abs(one - 7)

    assert best_of(range(12), (2, 3, 4), value) == 7
    assert asked == [2, 3, 4, 5, 6, 7, 8]  # each once, and no further than past the best
    assert best_of(range(12), (5, 6, 7, 8, 9), value) == 7
    assert best_of((1, 2), (1, 2), value) == 2


def test_epochs_are_chosen_on_the_tuning_part_alone() -> None:
    tuning = [[(1, 10)], [(5, 10)], [(5, 10)], [(2, 10)]]
    report = [[(9, 10)], [(3, 10)], [(8, 10)], [(9, 10)]]
    outcome = Outcome(tuning, report)
    assert outcome.epoch == 2
    assert outcome.tuned == 1.5
    assert length(outcome.reported) == pytest.approx(1.3)


def test_interval_of_a_difference() -> None:
    generator = torch.Generator().manual_seed(1)
    hits = torch.randint(0, 60, (100,), generator=generator).tolist()
    theirs = [(one, 40) for one in hits]
    assert interval_of_difference(theirs, theirs) == (
        0,
        0,
    )  # sequences differ, drafters do not: they are drawn in pairs
    low, high = interval_of_difference([(one + 4, 40) for one in hits], theirs)
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)
    low, high = interval_of_difference([(60 - one, 40) for one in hits], theirs)
    assert low < length([(60 - one, 40) for one in hits]) - length(theirs) < high


def test_a_sweep_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    trained: list[str] = []

    def train(name: str) -> Outcome:
        trained.append(name)
        return Outcome([[(1, 2)]], [[(3, 4)]], {"name": name})

    file = tmp_path / "kind" / "lr.json"
    first = kept(file, ["about", 1], lambda: train("first"))
    again = kept(file, ["about", 1], lambda: train("again"))
    assert trained == ["first"]
    assert (again.more, again.tuned, length(again.reported)) == (first.more, first.tuned, length(first.reported))
    assert kept(file, ["about", 2], lambda: train("other")).more == {"name": "other"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, bench_learn.Text, Path]:
    """A recipe, its text in three parts, and the folder of both; the whole store is in `run/store`."""
    folder = tmp_path_factory.mktemp("tiny")
    run = make_run(folder, sequences=30, tokens=18)
    recipe = make_recipe(folder, drafter={"kind": "eagle"}, epochs=2)
    return recipe, bench_learn.divide(run / "store", folder / "tuning" / "store"), folder


def test_the_report_part_is_nobodys(tiny: tuple[Recipe, bench_learn.Text, Path]) -> None:
    _, text, folder = tiny
    whole = Store(folder / "run" / "store")
    ids = {row: whole.sample_id(row) for row in range(len(whole))}
    held_out = {ids[row] for row in whole.rows(held_out=True)}
    reported = {one.sample_id for one in text.report}
    assert {text.store.sample_id(row) for row in text.training} == {ids[row] for row in whole.rows(held_out=False)}
    assert {one.sample_id for one in text.tuning} | reported == held_out
    assert not {one.sample_id for one in text.tuning} & reported
    assert reported
    assert text.tuning
    for row in range(len(text.store)):
        (same,) = (whole[i] for i in ids if ids[i] == text.store.sample_id(row))
        assert torch.equal(text.store[row].hidden_states, same.hidden_states)
        assert torch.equal(text.store[row].token_ids, same.token_ids)
    record = folder / "tuning" / "store" / "stage.json"
    before = record.stat().st_mtime_ns
    bench_learn.divide(folder / "run" / "store", folder / "tuning" / "store")
    assert record.stat().st_mtime_ns == before


def test_the_held_out_parts_are_halves() -> None:
    assert 450 < sum(bench_learn.is_report(number, held_out=True) for number in range(1000)) < 550
    assert not any(bench_learn.is_report(number, held_out=False) for number in range(1000))


def test_ours_is_predicted_on_the_report_part(tiny: tuple[Recipe, bench_learn.Text, Path]) -> None:
    recipe, text, folder = tiny
    found = bench_learn.train_ours(recipe, text, folder / "ours")
    assert len(found) == len(text.report)
    assert length(found) > 1
    answered = [int(one.loss_mask.sum()) for one in text.report]
    for (accepted, drafts), tokens in zip(found, answered, strict=True):
        # Steps cover the answer but for its first token, and the last one's extra token may be past its end.
        assert tokens - 1 <= accepted + drafts <= tokens


def test_ours_has_the_number_of_epochs_that_is_best_on_the_tuning_part(
    tiny: tuple[Recipe, bench_learn.Text, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = tiny
    monkeypatch.setattr(bench_learn, "RUNS", folder / "runs")
    monkeypatch.setattr(bench_learn, "EPOCHS", 1)
    monkeypatch.setattr(bench_learn, "OUR_EPOCHS", (1, 2, 3))
    best = bench_learn.with_best_epochs(recipe, text)
    found = {}
    for run_dir in (folder / "runs").iterdir():
        record = stage.read(run_dir / "checkpoint")
        assert record is not None
        epochs = record["recipe"]["train"]["epochs"]
        assert run_dir.name == ("eagle" if epochs == 1 else f"eagle-{epochs:g}-epochs")
        found[epochs] = record["figures"]["predicted_acceptance_length"][str(recipe.evaluate.acceptance_k)]
    assert {1, 2} <= found.keys()
    assert (3 in found) == (found[2] > found[1]), "further only while it is better"
    assert found[best.train.epochs] == max(found.values())


def test_a_reference_is_swept_and_kept(
    tiny: tuple[Recipe, bench_learn.Text, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = tiny
    monkeypatch.setattr(bench_learn, "RUNS", folder)
    monkeypatch.setattr(bench_learn, "FIRST_TRIED", {"eagle": (3e-5, 1e-4)})
    monkeypatch.setattr(references, "TOKENS_PER_STEP", 70)
    best, settings = bench_learn.tuned_reference(recipe, text)
    files = {file.name for file in (folder / "references" / "eagle").iterdir()}
    assert {"lr-3e-05-epochs-1.json", "lr-0.0001-epochs-1.json"} <= files
    assert {name.partition("epochs-")[2] for name in files} >= {"1.json", "2.json", "4.json"}
    outcomes = {name: json.loads((folder / "references" / "eagle" / name).read_text()) for name in files}
    lengths = [length(epoch) for outcome in outcomes.values() for epoch in outcome["tuning"]]
    assert best.tuned == max(lengths)
    assert "where 3e-05 is published" in settings
    # Another rate is another training: the sweep's values really reach the optimizer.
    assert len({json.dumps(outcome["tuning"]) for outcome in outcomes.values()}) > 1
    monkeypatch.setattr(bench_learn, "train_reference", None)  # everything is there: nothing is trained again
    monkeypatch.setitem(REFERENCES, "medusa", REFERENCES["mlp_speculator"])
    assert bench_learn.tuned_reference(recipe, text)[1] == settings
    monkeypatch.setitem(REFERENCES, "eagle", replace(REFERENCES["eagle"], weight_decay=0.0))
    with pytest.raises(TypeError, match="NoneType"):
        bench_learn.tuned_reference(recipe, text)


def test_a_change_to_a_reference_is_its_kinds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was trained by the others' recipes is not trained again; what was trained in another precision is."""

    def changed() -> set[str]:
        return {kind for kind in REFERENCES if json.dumps(references.made_from(kind)) != before[kind]}

    monkeypatch.setattr(references, "native_bfloat16", lambda: False)
    before = {kind: json.dumps(references.made_from(kind)) for kind in REFERENCES}
    with monkeypatch.context() as patch:
        patch.setattr(references, "native_bfloat16", lambda: True)
        assert changed() == {"medusa"}
    ours = REFERENCES["medusa"]
    others: dict[str, Any] = {
        "loss": references.eagle_loss, "schedule": references.constant, "clip": references._clip_value, "betas": (0.9, 0.99),
        "weight_decay": 0.1,
    }  # fmt: skip
    for name, other in others.items():
        with monkeypatch.context() as patch:
            patch.setitem(REFERENCES, "medusa", replace(ours, **{name: other}))
            assert changed() == {"medusa"}, name
    for name in ("start_as_published", "train_reference", "_shuffled"):
        with monkeypatch.context() as patch:
            patch.setattr(references, name, references.constant)
            assert changed() == {*REFERENCES}, name
    with monkeypatch.context() as patch:
        patch.setattr(references, "TOKENS_PER_STEP", 70)
        assert changed() == {*REFERENCES}
    assert not changed()


def test_medusas_reference_learns_the_same_in_bfloat16(
    tiny: tuple[Recipe, bench_learn.Text, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its launch script trains it, where the processor has that arithmetic: products round, weights stay float32."""
    _, text, folder = tiny
    recipe = make_recipe(folder, drafter={"kind": "medusa", "num_heads": 2})
    monkeypatch.setattr(references, "TOKENS_PER_STEP", 70)
    target = describe_target(folder / "target", recipe.target)
    tensors = load_target_tensors(target.path)
    trained = {}
    for native in (False, True):
        monkeypatch.setattr(references, "native_bfloat16", lambda native=native: native)
        drafter = MedusaDrafter.from_target(
            MedusaDrafter.make_config(recipe.train.drafter, target, (target.num_hidden_layers,), target.vocab_size),
            tensors,
            torch.arange(target.vocab_size),
        )
        column = text.store.identity.layer_ids.index(target.num_hidden_layers)
        epochs = references.train_reference("medusa", drafter, tensors, text.store, column, epochs=1, steps=2, lr=1e-3)
        assert list(epochs) == [1]
        trained[native] = drafter.lm_heads[1].weight.detach()
    assert trained[True].dtype == torch.float32
    moved = {native: weight - tensors.lm_head.float() for native, weight in trained.items()}
    assert moved[False].norm() > 0
    assert not torch.equal(moved[True], moved[False]), "nothing was rounded"
    assert torch.cosine_similarity(moved[True].flatten(), moved[False].flatten(), dim=0) > 0.99


@pytest.mark.parametrize("kind", ["medusa", "mlp_speculator", "eagle"])
def test_references_train_as_long_as_they_gain(
    kind: str, tiny: tuple[Recipe, bench_learn.Text, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning rates are swept by one epoch each, and then numbers of epochs at the best. Each epoch here gains something up to the fourth."""
    asked: list[tuple[float, int]] = []

    def outcome(recipe: Recipe, text: bench_learn.Text, *, lr: float, epochs: int) -> Outcome:
        asked.append((lr, epochs))
        return Outcome([[(round(100 * (lr == 3e-4)) + min(n, 3), 100)] for n in range(epochs)], [[(1, 1)]] * epochs)

    monkeypatch.setattr(bench_learn, "reference_outcome", outcome)
    recipe = bench_learn.learn_recipe(kind)
    _, settings = bench_learn.tuned_reference(recipe, tiny[1])
    assert settings.startswith("lr 0.0003 where")
    assert {at for lr, at in asked if lr != 3e-4} == {1}
    assert {at for lr, at in asked if lr == 3e-4} == {1, 3, 6, 12}
    assert settings.endswith("epoch 4 of 6")


def test_the_report_suite_has_the_report_part(tiny: tuple[Recipe, bench_learn.Text, Path], tmp_path: Path) -> None:
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"question {i}"}]} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = Recipe.model_validate(
        tiny[0].model_dump(mode="json")
        | {"extract": {"prompts": {"path": str(tmp_path / "prompts.jsonl")}, "held_out_fraction": 0.5}}
    )
    held_out = bench_learn.training_and_held_out(recipe.extract)[1]
    sequences = [type("Held", (), {"sample_id": one.sample_id})() for one in held_out[::2]]
    text = bench_learn.Text(tiny[1].store, sequences)
    with_suite = bench_learn.with_report_suite(recipe, text, tmp_path)
    (suite,) = with_suite.evaluate.suites.values()
    found = load_prompts(suite.prompts)
    assert [one.sample_id for one in found] == [one.sample_id for one in held_out[::2]]


def test_lookup_is_walked_as_served() -> None:
    """Twelve tokens of which every second pair repeats; a guess is accepted as far as it is right."""
    answer = Answer(np.array([1, 2, 3], np.int32), np.array([4, 1, 2, 3, 4, 9, 1, 2], np.int32))

    def propose(text: np.ndarray) -> list[int]:  # type: ignore[type-arg]
        return {4: [1, 2, 7], 7: [], 8: [9, 1, 2]}.get(len(text), [0])

    # The first token is the prompt's. 1, 2 right, then 3 by the target; 4 without a guess; 9, 1, 2 right, and none after.
    assert walk(answer, propose) == [(3, 2), (0, 0), (3, 3)]
    assert speedup([(3, 2), (0, 0)], lambda guessed: 1 + guessed / 3) == pytest.approx(4 / 3)


@pytest.mark.parametrize("kind", ["p_eagle", "dflash", "dspark"])
def test_needed_operations_are_about_those_that_a_step_does(kind: str, tmp_path: Path) -> None:
    """Nothing is counted that torch's counter does not see too; what it sees beyond is done for rows that need it not."""
    make_run(tmp_path, sequences=6, tokens=20)
    sequences = []
    for number in range(3):
        ids = torch.randint(0, 80, (101,), dtype=torch.int32)
        sequences.append(Sequence(number, False, ids, torch.arange(101) >= 30, torch.randn(100, 4, 32)))
    recipe = bench_learn.learn_recipe(kind)
    assert recipe.evaluate.acceptance_k == 5
    step, needed = step_of_kind(recipe, describe_target(tmp_path / "target"), sequences, torch.arange(80))
    with FlopCounterMode(display=False) as counter:
        step()
    assert 0.7 < needed / counter.get_total_flops() < 1


def test_speculators_drafter_has_the_size_of_ours(tmp_path: Path) -> None:
    make_run(tmp_path, sequences=6, tokens=20)
    target, vocabulary = describe_target(tmp_path / "target"), torch.arange(60)
    sizes = {
        kind: hand_over(target, (1, 2, 3), vocabulary, (1, 2), bench_learn.learn_recipe(kind).train.drafter)
        for kind in ("eagle3", "p_eagle", "dflash", "dspark")
    }
    assert [one.kind for one in sizes.values()] == ["eagle3", "peagle", "dflash", "dspark"]
    assert sizes["eagle3"].own_options == {"num_layers": 1}
    assert sizes["p_eagle"].own_options == {
        "num_layers": 2,
        "mask_token_id": 79,
        "num_depths": 5,
        "draft_arch": "llama",
    }
    # As many blocks as ours draws at most in a step: each of 1,024 positions twice, in blocks of five draft tokens.
    blocks = {"num_layers": 2, "mask_token_id": 79, "block_size": 6, "max_anchors": 410}
    assert sizes["dspark"].own_options == blocks | {"markov_rank": 64}


def test_what_a_draft_costs_and_brings() -> None:
    found = figures_of("block", [[1.2, 1.3], [1.2, 1.3]], [[0.1, 0.1], [0.2, 0.2]], [1.0, 1.6, 1.9])
    assert found["drafts.block_cost"]["value"] == pytest.approx(1.25)
    assert "error over prompts 0.035" in found["drafts.block_cost"]["against"]
    assert found["drafts.block_drafting"]["value"] == pytest.approx(0.15)
    assert found["drafts.block_drafting"]["against"] == "by start 0.100, 0.200; the check 0.100"
    assert found["drafts.block_speedup"]["value"] == pytest.approx(1.9 / 1.25)
    assert found["drafts.block_speedup"]["against"].endswith(
        "1.900 tokens a step, accepted by position, given those before: 0.600, 0.500"
    )


@pytest.mark.parametrize(("kind", "longer"), [("dflash", False), ("dflash", True), ("p_eagle", True)])
def test_block_drafters_of_the_peer_have_as_many_epochs_or_their_best_number(
    kind: str, longer: bool, tiny: tuple[Recipe, bench_learn.Text, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best rate here is 1e-2, an edge of what is tried first; and six epochs are better than three and twelve."""
    asked = []

    def outcome(*_: Any, layer_ids: tuple[int, ...] | None, lr: float, epochs: int) -> Outcome:
        asked.append((lr, epochs))
        accepted = 1000 + {1e-3: 0, 3e-3: 10, 1e-2: 20}.get(lr, 0) + {1: 0, 3: 100, 6: 150, 12: 140}[epochs]
        return Outcome([[(accepted, 1000)]], [[(accepted, 1000)]], {"layer_ids": list(layer_ids or ())})

    monkeypatch.setattr(bench_learn, "peer_outcome", outcome)
    monkeypatch.setattr(bench_learn, "learn_target", lambda: describe_target(tiny[2] / "target"))
    recipe = bench_learn.learn_recipe(kind)
    _, settings = bench_learn.tuned_peer(recipe, tiny[1], longer=longer)
    tried = {epochs for _, epochs in asked}
    assert tried == ({1, 3, 6, 12} if longer else {1, 3})
    assert f"lr 0.01, epoch 1 of {6 if longer else 3}" in settings
