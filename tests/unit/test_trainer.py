"""The trainer's options: each does what its docstring says, on one process."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.config.training import TrainConfig
from draftsmith.run import stage
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.train import data, epochs
from draftsmith.train import train as trainer
from draftsmith.train.data import ScheduledStep, TrainingData
from draftsmith.train.optimizers import learning_rate_factor
from draftsmith.train.snapshot import SNAPSHOT
from tests.unit.tiny_run import make_recipe, make_run
from tests.unit.training_runs import EAGLE3, losses_of, run_dir, train, weights_of

pytestmark = pytest.mark.usefixtures("single_thread")


def test_a_loss_that_is_not_finite_stops_with_its_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainingData.batch

    def broken(reader: TrainingData, rows: list[int], **named: Any) -> Any:
        batch = original(reader, rows, **named)
        if training and len(calls) >= 4 and 7 in rows:  # not in the initialization, nor in the first step
            batch.hidden_states[:] = math.inf
        calls.append(1)
        return batch

    def checked(run: Any, *arguments: Any) -> None:
        runs.append(run)
        check(run, *arguments)

    def fit(*arguments: Any) -> None:
        calls.clear()
        training.append(1)
        original_fit(*arguments)

    check, original_fit = trainer._require_finite, trainer._fit
    monkeypatch.setattr(trainer, "_fit", fit)
    training: list[int] = []
    calls: list[int] = []
    runs: list[Any] = []
    directory = run_dir(folder, "nan")
    monkeypatch.setattr(TrainingData, "batch", broken)
    monkeypatch.setattr(trainer, "_require_finite", checked)
    few = {**EAGLE3, "tokens_per_step": 50, "state_dropout": 0, "gradient_accumulation_steps": 2, "save_every_steps": 1}
    with pytest.raises(
        DraftsmithError, match=r"The loss is nan in step (\d+) .* samples of .*: 7\. Training"
    ) as raised:
        train(folder, directory, **few)
    assert raised.value.exit_status == 1
    step = int(str(raised.value).split("in step ")[1].split()[0])
    snapshot = torch.load(directory / "checkpoint" / SNAPSHOT, weights_only=True)
    assert snapshot["progress"]["step"] == step - 1
    for name, value in runs[-1].loss.drafter.state_dict().items():
        assert torch.equal(value, snapshot["drafter"][name]), "the step that failed changes no weight"
    assert all(value.isfinite().all() for value in snapshot["drafter"].values())


def test_a_gradient_that_is_not_finite_stops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is finite."""
    monkeypatch.setattr(trainer.Accelerator, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    with pytest.raises(DraftsmithError, match=r"The gradient's norm is inf in step 1 \(epoch 1"):
        train(folder, run_dir(folder, "inf"), **EAGLE3)


def test_learning_rates_that_are_far_too_high_stop(folder: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"(The gradient's norm|The loss) is (nan|inf) in step \d+ \(epoch"):
        train(folder, run_dir(folder, "high"), **{**EAGLE3, "lr": 1e30, "muon_lr": 1e30})


def test_training_without_a_gradient_stops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with FSDP2 where torch finds no tensor in what a module returns."""
    monkeypatch.setattr(trainer.Accelerator, "backward", lambda *_: None)
    with pytest.raises(DraftsmithError, match="No gradient has reached the drafter in step 1"):
        train(folder, run_dir(folder, "no-gradient"), **EAGLE3)


def test_more_epochs_are_kept_than_there_are(folder: Path) -> None:
    directory = run_dir(folder, "kept")
    train(folder, directory, keep_last_epochs=5, **EAGLE3)
    assert sorted(path.name for path in (directory / "checkpoint").glob("epoch-*")) == ["epoch-1", "epoch-2", "epoch-3"]


def test_the_best_epoch_is_published_and_the_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter([1.2, 1.5, 1.3] * 2)
    monkeypatch.setattr(epochs, "predict_acceptance", lambda *_, k, add_up: {1: 1.9, k: next(lengths)})
    best, last = run_dir(folder, "best"), run_dir(folder, "last")
    figures = train(folder, best, keep_last_epochs=2, **EAGLE3)
    assert figures["published_epoch"] == 2
    assert figures["predicted_acceptance_length"] == {"1": 1.9, "5": 1.5}
    assert sorted(path.name for path in (best / "checkpoint").glob("epoch-*")) == ["epoch-2", "epoch-3"]
    assert train(folder, last, publish_epoch="last", **EAGLE3)["published_epoch"] == 3
    assert not list((last / "checkpoint").glob("epoch-*"))
    published, third = weights_of(best / "checkpoint"), weights_of(best / "checkpoint" / "epoch-3")
    second = weights_of(best / "checkpoint" / "epoch-2")
    for name, value in weights_of(last / "checkpoint").items():
        assert torch.equal(published[name], second[name])
        assert torch.equal(value, third[name])
    assert not torch.equal(published["fc.weight"], third["fc.weight"])


def test_averaged_weights_are_published_and_do_not_affect_training(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history: list[torch.Tensor] = []
    original = trainer._step

    def watched(run: Any, *arguments: Any) -> Any:
        if not history:
            history.append(run.loss.drafter.fc.weight.detach().clone())
        done = original(run, *arguments)
        history.append(run.loss.drafter.fc.weight.detach().clone())
        return done

    monkeypatch.setattr(trainer, "_step", watched)
    directory = run_dir(folder, "ema")
    train(folder, directory, ema=0.7, publish_epoch="last", **EAGLE3)
    average = history[0]
    for step, weight in enumerate(history[1:]):
        decay = min(0.7, (step + 1) / (step + 10))
        average = decay * average + (1 - decay) * weight
    torch.testing.assert_close(weights_of(directory / "checkpoint")["fc.weight"], average)
    assert losses_of(directory) == losses_of(whole)


def test_recomputed_activations_are_the_same(folder: Path, whole: Path) -> None:
    medusa = {"drafter": {"kind": "medusa", "num_heads": 2}, "epochs": 1, "lr": 3e-3}
    kept = run_dir(folder, "medusa-kept")
    train(folder, kept, **medusa)
    for name, options, same in (("again", EAGLE3, whole), ("medusa-again", medusa, kept)):
        directory = run_dir(folder, name)
        train(folder, directory, activation_checkpointing=True, **options)
        assert losses_of(directory) == losses_of(same)


@pytest.mark.parametrize(("native", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_hardware_decides_the_precision_that_a_recipe_leaves_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, native: bool, precision: str
) -> None:
    """The checkpoint is then up to date on any hardware."""
    monkeypatch.setattr(trainer, "native_bfloat16", lambda device: native and device == "cpu")
    directory, left_open = run_dir(folder, f"open-{precision}"), {"precision": None, **EAGLE3}
    train(folder, directory, **left_open)
    asked = run_dir(folder, f"asked-{precision}")
    train(folder, asked, precision=precision, **EAGLE3)
    assert losses_of(directory) == losses_of(asked)
    monkeypatch.setattr(trainer, "native_bfloat16", lambda device: not native)
    record = stage.read(directory / "checkpoint")
    assert record is not None
    assert record["recipe"]["train"]["precision"] == precision, (
        "the precision that was used, not that the recipe left it open"
    )
    for named in (None, precision):  # the asked one's recipe named it
        for done in (directory, asked):
            assert trainer.finished_training(make_recipe(folder, **left_open | {"precision": named}), done)
    other = "float32" if native else "bfloat16"
    for done in (directory, asked):
        assert trainer.finished_training(make_recipe(folder, **left_open | {"precision": other}), done) is None


@pytest.mark.parametrize(("others", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_all_processes_have_one_precision(
    folder: Path, monkeypatch: pytest.MonkeyPatch, others: bool, precision: str
) -> None:
    """With one each their optimizers would make different weights. The other processes' answers are made up."""
    monkeypatch.setattr(trainer, "native_bfloat16", lambda device: True)
    together = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda mine: torch.cat([mine, torch.full_like(mine, others)])
    )
    recipe = trainer._in_precision(make_recipe(folder, precision=None), None, together)
    assert recipe.train.precision == precision


def test_a_changed_recipe_is_not_told_of_a_precision_that_it_leaves_open(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "native_bfloat16", lambda device: False)
    directory = run_dir(folder, "left-open")
    train(folder, directory, precision=None, **EAGLE3)
    monkeypatch.setattr(trainer, "native_bfloat16", lambda device: True)
    train(folder, directory, precision=None, **EAGLE3 | {"lr": 2e-3})
    said = " ".join(capsys.readouterr().err.split())
    assert "is of another train.lr; training starts" in said
    assert re.findall(r"tokens, in (float32|bfloat16) on cpu", said) == ["float32", "bfloat16"]


def test_bfloat16_products_on_float32_weights(folder: Path, whole: Path) -> None:
    directory = run_dir(folder, "bfloat16")
    train(folder, directory, precision="bfloat16", **EAGLE3)
    found = losses_of(directory)
    assert found != losses_of(whole)
    assert found == pytest.approx(losses_of(whole), rel=2e-2)
    assert {value.dtype for value in weights_of(directory / "checkpoint").values()} == {torch.float32}


def test_bfloat16_learns_like_float32(tmp_path: Path) -> None:
    """With induction heads, linear fit, Muon's iteration and all products in bf16, acceptance is within 2%."""
    make_run(tmp_path, sequences=72, tokens=40)
    predicted = {}
    for precision in ("float32", "bfloat16"):
        directory = run_dir(tmp_path, precision)
        options = {**EAGLE3, "drafter": {"kind": "eagle3", "draft_vocab_size": 80}, "tokens_per_step": 400}
        predicted[precision] = train(tmp_path, directory, precision=precision, **options)["predicted_acceptance_length"]
    assert predicted["float32"]["3"] > 1.1, "else the comparison means little"
    assert predicted["bfloat16"] == pytest.approx(predicted["float32"], rel=0.02)


def test_loading_ahead_changes_nothing(folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data._loads_ahead(torch.device("cuda"))
    assert not data._loads_ahead(torch.device("cpu"))
    monkeypatch.setattr(data, "_loads_ahead", lambda device: True)
    directory = run_dir(folder, "ahead")
    train(folder, directory, **EAGLE3)
    assert losses_of(directory) == losses_of(whole)


def test_schedules() -> None:
    for schedule, half, last in (("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1.0, 1.0)):
        factors = [learning_rate_factor(step, 110, 10 / 110, schedule) for step in range(110)]
        assert factors[:11] == pytest.approx([*(n / 10 for n in range(1, 11)), 1])
        assert factors[60] == pytest.approx(half)
        assert factors[-1] == pytest.approx(last, abs=0.011)
        assert min(factors) > 0
    assert learning_rate_factor(35, 110, 10 / 110, "cosine") == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert learning_rate_factor(35, 110, 10 / 110, "linear") == pytest.approx(0.75)


def test_a_missing_tracker_is_an_error_before_any_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_dir(folder, "tracker")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"`train.tracker: trackio` needs the package trackio.*pip install -e '\.\[trackers\]'"
    ):
        train(folder, directory, tracker="trackio", **EAGLE3)
    assert not (directory / "checkpoint").exists()


@pytest.mark.parametrize(
    ("processes", "micro_batches", "sequences", "said"),
    [
        (1, 1, [1, 1, 1], None),
        (4, 1, [4, 4, 4], None),
        (4, 1, [5, 5, 2], None),
        (
            4,
            1,
            [4, 3, 3],
            "3.3 sequences on average and 4 micro-batches (processes * gradient_accumulation_steps = 4 * 1)",
        ),
        (2, 2, [2, 2, 2], "a `train.tokens_per_step` of about 150 each has one"),
    ],
)
def test_steps_with_fewer_sequences_than_micro_batches_are_told(
    processes: int, micro_batches: int, sequences: list[int], said: str | None
) -> None:
    run: Any = SimpleNamespace(
        recipe=SimpleNamespace(train=TrainConfig(gradient_accumulation_steps=micro_batches)),
        accelerator=SimpleNamespace(num_processes=processes),
        schedule=[ScheduledStep(0, [0] * count) for count in sequences],
        data=SimpleNamespace(store=SimpleNamespace(length=lambda row: 30)),
    )
    found = trainer._few_sequences(run)
    assert found is None if said is None else said in found


def test_they_are_told_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(
        folder,
        run_dir(folder, "few"),
        **{**EAGLE3, "epochs": 1, "tokens_per_step": 20, "gradient_accumulation_steps": 2},
    )
    assert capfd.readouterr().err.count("compute in vain") == 1
    train(folder, run_dir(folder, "enough"), **{**EAGLE3, "epochs": 1, "gradient_accumulation_steps": 2})
    assert "compute in vain" not in capfd.readouterr().err
