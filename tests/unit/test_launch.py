"""`draftsmith run` trains in processes of its own: figures, errors, signals, and nothing left when it is killed."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from draftsmith.cli import main, stages
from draftsmith.run.errors import Stopped, UserError
from draftsmith.train import launch
from draftsmith.train.launch import process_count, train_in_processes
from draftsmith.train.train import LOSSES
from tests.unit.tiny_run import make_recipe
from tests.unit.training_runs import EAGLE3, SERVER, losses_of, require_alike, run_dir

LONG = {**EAGLE3, "epochs": 50}
"""200 steps: enough time to be stopped."""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the order of sums is fixed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def refuse(*arguments: Any, **named: Any) -> None:
    raise AssertionError("not in this process")


# ---- results ----


def test_one_process_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_count() == max(1, torch.cuda.device_count())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert process_count() == 8


def test_one_child_or_two_train_as_a_process_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run_train", refuse)
    recipe = make_recipe(folder, **EAGLE3)
    one, two = run_dir(folder, "one"), run_dir(folder, "two")
    figures = train_in_processes(recipe, one)
    assert figures == json.loads((one / "checkpoint" / "stage.json").read_text())["figures"]
    assert figures["processes"] == 1
    printed = capfd.readouterr().err
    assert "train: 12/12 steps" in printed
    assert "up to date" not in printed, "it was just made"

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setenv("ACCELERATE_USE_CPU", "true")
        figures = train_in_processes(recipe, two)
    assert figures["processes"] == 2
    assert capfd.readouterr().err.count("train: 12/12 steps") == 1, "one of them shows progress"
    require_alike(one, two)

    monkeypatch.setattr(launch, "start_processes", refuse)
    assert train_in_processes(recipe, two) == figures
    assert " ".join(capfd.readouterr().err.split()).count("checkpoint is up to date") == 1


# ---- the command ----


def command(folder: Path, name: str, options: dict[str, Any], processes: int = 1) -> None:
    """`draftsmith run` in a session of its own, its stages before and after training left out. What all processes print goes to
    `folder/NAME.log`, and after training `folder/NAME.evaluated` is there."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs in the background of a shell
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.cuda.device_count = lambda: processes
    os.environ |= {"OMP_NUM_THREADS": "1"} | ({"ACCELERATE_USE_CPU": "true"} if processes > 1 else {})
    recipe = folder / f"{name}.yaml"
    recipe.write_text(make_recipe(folder, **options).model_copy(update={"name": name}).model_dump_json())

    def evaluate(recipe: Any, directory: Path) -> dict[str, Any]:
        (folder / f"{name}.evaluated").touch()
        return {}

    stages.STAGES.update(extract=lambda *_: {}, convert=lambda *_: {}, evaluate=evaluate)
    sys.argv = ["draftsmith", "run", str(recipe), "--runs", str(folder)]
    main()


@contextmanager
def running(folder: Path, name: str, options: dict[str, Any], processes: int = 1) -> Iterator[ForkServerProcess]:
    parent = SERVER.Process(target=command, args=(folder, name, options, processes))
    parent.start()
    try:
        yield parent
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.join()


def training_processes(parent: ForkServerProcess) -> list[psutil.Process]:
    children = psutil.Process(parent.pid).children()
    return [one for one in children if "spawn_main" in " ".join(one.cmdline())]


def printed(folder: Path, name: str) -> str:
    return " ".join((folder / f"{name}.log").read_text().split())


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(1200):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within two minutes")


def trains(folder: Path, name: str) -> bool:
    """Whether the first step has begun."""
    return (folder / f"{name}.log").exists() and "train: 0/200 steps" in printed(folder, name)


def all_gone(session: int) -> bool:
    """Whether no process of the session is left."""
    with suppress(ProcessLookupError):
        os.killpg(session, 0)
        return False
    return True


@pytest.mark.parametrize("processes", [1, 2])
def test_a_childs_error_is_one_paragraph(folder: Path, processes: int) -> None:
    """From a single process, and from two with the same error."""
    name = f"wrong-{processes}"
    run_dir(folder, name)
    wrong = {**EAGLE3, "drafter": {"kind": "eagle3", "layer_ids": [0, 1], "draft_vocab_size": 60}}
    with running(folder, name, wrong, processes) as parent:
        parent.join(120)
    assert parent.exitcode == UserError.exit_status
    said = printed(folder, name)
    assert said.startswith("error: Training needs hidden states of layers [0], and the store at")
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert not (folder / f"{name}.evaluated").exists()


def finish_slowly(folder: Path, name: str) -> None:
    """`command`, where training's process says when it has made the last step, and takes its time after it."""
    launch._process = slow_to_finish
    command(folder, name, EAGLE3)


def slow_to_finish(*arguments: Any) -> None:
    from draftsmith.train import train as trainer

    finish_epoch = trainer.finish_epoch

    def slow(run: Any, *rest: Any) -> Any:
        if run.progress.step == len(run.schedule):
            run.directory.with_name("last-step").touch()
            time.sleep(3)
        return finish_epoch(run, *rest)

    trainer.finish_epoch = slow
    launch_process(*arguments)


launch_process = launch._process


def test_sigterm_after_the_last_step_stops_before_the_next_stage(folder: Path) -> None:
    directory = run_dir(folder, "late")
    parent = SERVER.Process(target=finish_slowly, args=(folder, "late"))
    parent.start()
    wait_for((directory / "last-step").exists)
    os.kill(parent.pid, signal.SIGTERM)
    parent.join(120)
    parent.kill()  # does nothing if it has ended
    assert parent.exitcode == Stopped.exit_status
    assert "training is finished. Run the same command again" in printed(folder, "late")
    assert (directory / "checkpoint" / "stage.json").exists()
    assert not (folder / "late.evaluated").exists()


def fail_in_training(folder: Path, name: str) -> None:
    """`command`, where the processes of training raise what nobody foresees."""
    launch._process = unforeseen
    command(folder, name, EAGLE3)


def unforeseen(*_: Any) -> None:
    raise ZeroDivisionError("of no\nuse [bold]")


def test_a_childs_traceback_is_printed_with_a_paragraph(folder: Path) -> None:
    run_dir(folder, "unforeseen")
    parent = SERVER.Process(target=fail_in_training, args=(folder, "unforeseen"))
    parent.start()
    parent.join(120)
    parent.kill()  # does nothing if it has ended
    assert parent.exitcode == 1
    said = printed(folder, "unforeseen")
    assert said.count("Traceback") == 1
    assert "error: Training process 0 failed: use [bold]. Its traceback is above. Run the same command again" in said


def test_a_processs_own_error_wins_over_what_it_did_to_others(tmp_path: Path) -> None:
    """The others lose their connection to it, and may be seen first."""
    raised = ProcessRaisedException("Connection closed by peer", 1, 2)
    (tmp_path / "0").write_text(json.dumps([1, "There is no room."]))
    assert str(launch._error_of(raised, tmp_path)) == "There is no room."


def test_sigterm_saves_and_the_same_command_goes_on(folder: Path) -> None:
    """One process is stopped, as by a scheduler; two resume its training, and then nothing is left to do."""
    directory = run_dir(folder, "stopped")
    with running(folder, "stopped", LONG) as parent:
        wait_for(lambda: trains(folder, "stopped"))
        os.kill(parent.pid, signal.SIGTERM)
        parent.join(120)
    assert parent.exitcode == 143
    said = printed(folder, "stopped")
    assert said.count("error: Stopped by SIGTERM after step") == 1
    assert "Traceback" not in said
    assert not (folder / "stopped.evaluated").exists()
    assert not (directory / "checkpoint" / LOSSES).exists()

    with running(folder, "stopped", LONG, processes=2) as parent:
        parent.join(300)
    assert parent.exitcode == 0, printed(folder, "stopped")
    assert "train: continuing" in printed(folder, "stopped")
    assert (folder / "stopped.evaluated").exists()
    assert len(losses_of(directory)) == 200


def test_a_request_to_save_ends_no_process_that_has_just_been_started(folder: Path) -> None:
    run_dir(folder, "early")
    with running(folder, "early", EAGLE3) as parent:
        wait_for(lambda: bool(training_processes(parent)))
        training_processes(parent)[0].send_signal(signal.SIGUSR1)
        parent.join(120)
    assert parent.exitcode == 0, printed(folder, "early")


@pytest.mark.parametrize("everyone", [True, False], ids=["all of the terminal's", "the command alone"])
def test_ctrl_c_ends_all(folder: Path, everyone: bool) -> None:
    name = f"interrupted-{everyone}"
    run_dir(folder, name)
    with running(folder, name, LONG, processes=2) as parent:
        wait_for(lambda: trains(folder, name))
        (os.killpg if everyone else os.kill)(parent.pid, signal.SIGINT)
        parent.join(120)
        assert parent.exitcode == 130
        wait_for(lambda: all_gone(parent.pid))
    said = printed(folder, name)
    assert said.endswith("interrupted; run the same command again to continue")
    assert "Traceback" not in said


def test_a_killed_child_is_an_error_and_a_killed_command_leaves_none(folder: Path) -> None:
    run_dir(folder, "killed-child")
    with running(folder, "killed-child", LONG, processes=2) as parent:
        wait_for(lambda: trains(folder, "killed-child"))
        training = training_processes(parent)
        assert len(training) == 2
        training[1].kill()
        parent.join(120)
        assert parent.exitcode == 1
        wait_for(lambda: all_gone(parent.pid))
    said = printed(folder, "killed-child")
    assert "error: Training process 1 ended with SIGKILL" in said
    assert not (folder / "killed-child.evaluated").exists()

    run_dir(folder, "killed")
    with running(folder, "killed", LONG, processes=2) as parent:
        wait_for(lambda: trains(folder, "killed"))
        parent.kill()
        parent.join()
        wait_for(lambda: all_gone(parent.pid))


def test_a_launcher_must_not_start_the_whole_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(stages, "STAGES", {"extract": refuse})
    (folder / "launched.yaml").write_text(make_recipe(folder).model_dump_json())
    monkeypatch.setattr(sys, "argv", ["draftsmith", "run", str(folder / "launched.yaml"), "--runs", str(folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "`accelerate launch` is for `draftsmith train`" in " ".join(capsys.readouterr().err.split())
