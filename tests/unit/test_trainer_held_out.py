"""The trainer reads held-out text a few sequences at a time, when it predicts, and each process reads its part."""

import weakref
from pathlib import Path
from typing import Any

import pytest

from draftsmith.convert.convert import run_convert
from draftsmith.drafters.checkpoint import WEIGHTS
from draftsmith.run import stage
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.train import data, packing
from draftsmith.train import train as trainer
from tests.unit.tiny_run import make_recipe, make_run
from tests.unit.training_runs import EAGLE3, SERVER, ended, free_port, losses_of, process, run_dir, train

pytestmark = pytest.mark.usefixtures("single_thread")


def test_held_out_states_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten held-out conversations, at most two are in memory at once, one of which is being packed."""
    make_run(tmp_path, sequences=60)
    living: list[int] = []
    most: list[int] = []
    original = Store.__getitem__

    def watched(store: Store, index: int) -> Sequence:
        sequence = original(store, index)
        if sequence.held_out:
            living.append(index)
            most.append(len(living))
            weakref.finalize(sequence.hidden_states, living.remove, index)
        return sequence

    monkeypatch.setattr(Store, "__getitem__", watched)
    monkeypatch.setattr(packing, "_TOKENS_IN_BATCH", 1)
    for ahead, at_once in (
        (False, 2),
        (True, 7),
    ):  # with a GPU some are read early: two done, two being read, one due
        monkeypatch.setattr(data, "_loads_ahead", lambda device, ahead=ahead: ahead)
        directory = run_dir(tmp_path, f"ahead-{ahead}")
        most.clear()
        figures = train(tmp_path, directory, predict_temperature=0.7, **{**EAGLE3, "epochs": 1})
        assert list(figures["predicted_acceptance_length"]) == ["1", "2", "3", "4", "5"]
        assert len(most) == 2 * 10, "each is read once for either prediction"
        assert max(most) <= at_once


def test_without_held_out_text_figures_are_json(tmp_path: Path) -> None:
    """NaN is not, and Python alone reads it."""
    make_run(tmp_path, sequences=5)  # the sixth would be held out
    directory = run_dir(tmp_path, "all")
    options = {**EAGLE3, "epochs": 1, "predict_temperature": 0.7, "step_costs": {1: 1.1}}
    figures = train(tmp_path, directory, **options)
    assert figures["draft_vocabulary_coverage"] is None
    assert figures["predicted_acceptance_length"] == figures["predicted_speedup"] == {}
    run_convert(make_recipe(tmp_path, **options), directory)
    written = [*directory.rglob("*.json")]
    assert {path.name for path in written} >= {"stage.json", "draft.json"}
    assert not [path for path in written if "NaN" in path.read_text()]


def test_other_predictions_of_a_finished_drafter_train_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    directory, asked = run_dir(tmp_path, "asked"), {"predict_temperature": 0.7, "step_costs": {1: 1.1, 2: 1.3}}
    plain = train(tmp_path, directory, **EAGLE3)
    made = (directory / "checkpoint" / WEIGHTS).stat()
    before = stage.read(directory / "checkpoint")
    assert before is not None
    figures = train(tmp_path, directory, **EAGLE3, **asked)
    after = stage.read(directory / "checkpoint")
    assert after is not None
    assert figures == after["figures"]
    assert figures.keys() - plain.keys() == {"predicted_speedup", "predicted_at_temperature"}
    assert {name: figures[name] for name in plain} == plain
    assert [after[name] for name in ("finished_at", "wall_seconds")] == [
        before[name] for name in ("finished_at", "wall_seconds")
    ]
    assert trainer.finished_training(make_recipe(tmp_path, **EAGLE3, **asked), directory) == figures
    together = train(tmp_path, run_dir(tmp_path, "together"), **EAGLE3, **asked)
    for name in ("predicted_speedup", "predicted_at_temperature"):
        assert figures[name] == together[name]
    assert trainer.finished_training(make_recipe(tmp_path, **EAGLE3), directory) is None
    assert train(tmp_path, directory, **EAGLE3) == plain
    assert "from the beginning" not in capsys.readouterr().err
    assert (directory / "checkpoint" / WEIGHTS).stat() == made
    train(tmp_path, directory, **{**EAGLE3, "epochs": 1, "lr": 1e-3})
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"the drafter in {directory / 'checkpoint'} is of another train.epochs and train.lr; training starts from"
        in said
    )


def with_watched_reading(rank: int, folder: Path, directory: Path, port: int, options: dict[str, Any]) -> None:
    """One of two processes. In `read-RANK` each line is a held-out sequence that it reads: the steps done, its row, and how many of
    them it then holds."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(packing, "_TOKENS_IN_BATCH", 1)
    original, step = Store.__getitem__, trainer._step
    holds: list[int] = []
    steps: list[int] = []

    def watched(store: Store, index: int) -> Sequence:
        sequence = original(store, index)
        if sequence.held_out:
            holds.append(index)
            weakref.finalize(sequence.hidden_states, holds.remove, index)
            with (directory / f"read-{rank}").open("a") as file:
                print(len(steps), index, len(holds), file=file)
        return sequence

    def counted(*arguments: Any) -> Any:
        done = step(*arguments)
        steps.append(1)
        return done

    monkeypatch.setattr(Store, "__getitem__", watched)
    monkeypatch.setattr(trainer, "_step", counted)
    process(rank, folder, directory, options, port, None)


def test_processes_read_their_parts_of_the_held_out_text_when_they_predict(tmp_path: Path) -> None:
    """Of ten conversations two processes read five each, after the last step of every epoch, and hold at most two at once. The main
    process alone predicts at a temperature."""
    make_run(tmp_path, sequences=60)
    directory, options = run_dir(tmp_path, "watched"), {**EAGLE3, "predict_temperature": 0.7, "epochs": 2}
    port = free_port()
    started = [
        SERVER.Process(target=with_watched_reading, args=(rank, tmp_path, directory, port, options))
        for rank in range(2)
    ]
    for one in started:
        one.start()
    assert ended(started) == [0, 0]
    reads = [
        [tuple(map(int, line.split())) for line in (directory / f"read-{r}").read_text().splitlines()] for r in (0, 1)
    ]
    held_out = Store(directory / "store").rows(held_out=True)
    last_steps = (len(losses_of(directory)) // 2, len(losses_of(directory)))
    by_rank = [[(step, row) for step in last_steps for row in held_out[rank::2]] for rank in (0, 1)]
    by_rank[0] += [(last_steps[-1], row) for row in held_out]
    assert [[(step, row) for step, row, _ in of_rank] for of_rank in reads] == by_rank
    assert max(held for of_rank in reads for _, _, held in of_rank) <= 2
