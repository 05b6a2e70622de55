"""`scripts/gpu_check.sh`: what it says of checks that pass, fail, crash, hang or cannot run, and its own checks on a CPU."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.gpu.__main__ import Outcome, print_table, run_check, run_here
from tests.gpu.checks import CHECKS, Check

SCRIPT = Path("scripts/gpu_check.sh")


@pytest.mark.parametrize(
    ("program", "result", "why"),
    [
        ("print('text'); print('gpu-check: {\"tests\": \"3 passed\"}')", "pass", ""),
        ("assert False, 'other bits came back'", "fail", "AssertionError: other bits came back"),
        ("import os; os.kill(os.getpid(), 9)", "fail", ""),
        ("import sys; print('torch sees no CUDA device'); sys.exit(77)", "cannot run", "torch sees no CUDA device"),
        ("print('half a line')", "fail", "half a line"),
        ("import time; time.sleep(60)", "fail", "not done after 1 s"),
    ],
)
def test_a_check_comes_out(tmp_path: Path, program: str, result: str, why: str) -> None:
    check = Check("a", "some", "some check", "nowhere.nothing", seconds=1 if "sleep" in program else 60)
    found = run_check(check, [sys.executable, "-c", program], tmp_path)
    assert (found.result, found.why.startswith(why)) == (result, True)
    assert found.figures == ({"tests": "3 passed"} if result == "pass" else {})
    assert (tmp_path / "a-some.log").exists()


@pytest.mark.parametrize(
    ("missing", "cannot_run"), [("nowhere", True), ("draftsmith.nowhere", False), ("tests.nowhere", False)]
)
def test_only_what_others_make_can_be_missing(
    missing: str, cannot_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that the repository itself lacks is a fault of a check."""
    monkeypatch.setattr(Check, "run", lambda *_: importlib.import_module(missing))
    check = Check("a", "some", "some check", "nowhere.nothing")
    if cannot_run:
        assert run_here(check, cpu=True) == 77
    else:
        with pytest.raises(ModuleNotFoundError):
            run_here(check, cpu=True)


def test_every_check_is_a_function_and_every_function_a_check() -> None:
    for module in ("attention", "torch_alone", "training_step", "with_vllm"):
        names = {check.function.partition(".")[2] for check in CHECKS if check.function.partition(".")[0] == module}
        made = importlib.import_module(f"tests.gpu.{module}")
        checks = {
            name
            for name, function in inspect.getmembers(made, inspect.isfunction)
            if function.__module__ == made.__name__
            and not name.startswith("_")
            and [*inspect.signature(function).parameters] == ["cpu"]
            and function.__annotations__["return"] == "dict[str, str]"
        }
        assert names == checks


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([
        Outcome("a", "codec", "pass", {"bfloat16": "90 MB/s", "float32": "150 MB/s"}, 3.2),
        Outcome("b", "two-gpus", "cannot run", {}, 0.1, "two GPUs are needed"),
    ])  # fmt: skip
    first, second, third, *_, last = capsys.readouterr().out.splitlines()[1:]
    assert first.split()[:3] == ["a", "codec", "pass"]
    assert first.index("bfloat16") == second.index("float32")
    assert third.endswith("two GPUs are needed")
    assert last.startswith("1 passed, 0 failed, 1 could not run.")


def run_script(*arguments: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env={**os.environ, **environment})
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def _away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to a copy of the tree, made of links."""
    here = Path.cwd()
    for each in here.iterdir():
        if each.name not in {"runs", "build"}:
            (tmp_path / each.name).symlink_to(each)
    (tmp_path / "scripts").unlink()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_check.sh").symlink_to(here / SCRIPT)
    monkeypatch.chdir(tmp_path)


def test_without_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    status, said = run_script("all", PYTHON=str(tmp_path / "bare" / "bin" / "python"))
    assert status == 3, said
    assert f"0 passed, 0 failed, {len(CHECKS)} could not run" in said
    assert said.count("No module named 'torch'") == len(CHECKS)


def test_where_draftsmith_is_not_installed(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    python = str(tmp_path / "bare" / "bin" / "python")
    status, said = run_script("a", "--cpu", "codec", PYTHON=python, PYTHONPATH=packages)
    assert status == 0, said
    assert (tmp_path / "build" / "gpu-check" / "draftsmith" / "train").is_symlink()


def test_without_a_gpu() -> None:
    status, said = run_script("a", "machine", "codec", PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert status == 3, said
    assert said.count("sees no CUDA device") == 2


def test_a_name_that_is_none() -> None:
    status, said = run_script("a", "machin", PYTHON=sys.executable)
    assert status == 2
    assert "no check named machin; there are machine, device-tests" in said


def test_checks_on_a_cpu(tmp_path: Path) -> None:
    """All of part A but the device tests, which `make test` runs by themselves, and that vLLM loads."""
    names = [check.name for check in CHECKS if check.part == "a" and check.name != "device-tests"]
    status, said = run_script("all", "--cpu", *names, "imports", PYTHON=sys.executable)
    assert status == 0, said
    found = {one["name"]: one["figures"] for one in json.loads((tmp_path / "runs/gpu-check/results.json").read_text())}
    assert set(found) == {*names, "imports"}
    assert "TFLOP/s" in found["machine"]["bfloat16 products"]
    assert "0.4" in found["codec"]["bfloat16, int8"]
    for name in ("adamw-8b", "muon-8b"):
        assert "by the plan's arithmetic" in found[name]["peak memory"]
