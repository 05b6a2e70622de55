"""The command line: bad input gives one paragraph on stderr, exit status 2 and no traceback; --help loads no torch."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from rich.text import Text
from typer.testing import CliRunner

from draftsmith.cli import app, main
from draftsmith.cli.common import home_expanded
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation import evaluate

RECIPE = {
    "name": "cli",
    "target": {"model": "./target", "dtype": "float32"},
    "extract": {"prompts": {"path": "prompts.jsonl"}},
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "draftsmith.cli", *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def test_bad_input(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    to_store = ["--target", str(tmp_path / "no-target"), "--out", str(tmp_path / "store")]
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xff\xfe")
    cases = [
        (["extract", str(tmp_path / "nothing.yaml")], "No recipe at"),
        (["extract", str(recipe), "-s", "train.epoch=3"], "did you mean `epochs`?"),
        (["extract", str(recipe), "-s", "nonsense"], "is not an override"),
        (["extract", str(recipe), *runs], "target does not exist"),
        (["train", str(recipe), *runs], "no finished store"),
        (["convert", str(recipe), *runs], "no finished checkpoint"),
        (["run", str(tmp_path / "model.gguf")], "model.gguf is not text"),
        (
            ["convert", "d", "--to", "vllm", "--out", "o", "-s", "convert.quantize=int8"],
            "with --to a drafter is converted",
        ),
        (["evaluate", "a", "b", "--compare", *runs], "have no effect there"),
        (
            [
                "generate",
                str(recipe),
                "p",
                "--out",
                "o",
                "--method",
                "ngram",
                "--speculative-config",
                '{"method": "ngram"}',
            ],
            "Leave one out",
        ),
        (["generate", str(recipe), "p", "--out", "o", "--method", "none", "-k", "3"], "drafts none"),
        (
            ["import", str(tmp_path), "--target", "./typo", *to_store[2:], "--layer-ids", "1,2"],
            "target ./typo does not exist",
        ),
        (
            ["export", str(tmp_path), "--to", "zip", "--out", str(tmp_path / "out")],
            "`--to zip` must be one of files, speculators.",
        ),
        (["export", str(tmp_path), "--to", "files", "--out", str(tmp_path / "out")], "There is no store at"),
        (["import", str(tmp_path), *to_store, "--layer-ids", "1;2"], "`--layer-ids 1;2` must be integers with commas"),
        (["import", str(tmp_path), *to_store, "--layer-ids", "1,2"], "no-target does not exist"),
    ]
    done = run(*cases[0][0])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for arguments, said in cases:  # in this process: another takes seconds to import what this one has
        monkeypatch.setattr(sys, "argv", ["draftsmith", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        stdout, stderr = capsys.readouterr()
        assert ended.value.code == 2, (arguments, stderr)
        assert said in " ".join(stderr.split()), (arguments, stderr)
        assert stdout == ""


def test_another_s_directory_is_left_alone(recipe: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs" / "cli" / "vllm"
    checkpoint.mkdir(parents=True)
    (checkpoint / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="was not made by Draftsmith"):
        stage.claim(checkpoint, fresh=True)
    assert (checkpoint / "thesis.txt").read_text() == "years of work"


def test_help_and_version() -> None:
    code = """
import sys
from draftsmith.cli import main

commands = "run", "extract", "train", "convert", "predict", "evaluate", "tune", "serve", "publish", "inspect", "export", "import", "doctor"
for command in "", *commands:
    sys.argv = ["draftsmith", *command.split(), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    imported = {"torch", "vllm", "transformers", "accelerate"} & set(sys.modules)
    assert not imported, (command, imported)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == 14
    assert run("version").stdout.strip() == "0.1.0"


def test_help_shows_every_bracket() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in commands.values():
        for of in (command, *command.params):
            written = of.help or ""
            # Rich takes brackets that are not escaped for markup, and shows nothing of them.
            assert Text.from_markup(written).plain == written.replace(r"\[", "["), (command.name, of.name)
    done = CliRunner().invoke(app, ["export", "--help"], env={"COLUMNS": "200"})
    assert "OWNER/NAME[@REVISION] on the Hub" in done.output


def test_changed_answers_have_an_exit_status_of_their_own(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*arguments: object) -> None:
        raise evaluate.WrongAnswersError("Speculative decoding changed the target's answers: [16 of 16] differ.")

    monkeypatch.setattr(evaluate, "run_evaluate", wrong)
    monkeypatch.setattr(sys, "argv", ["draftsmith", "evaluate", str(recipe), "--runs", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as ended:
        main()
    stdout, stderr = capsys.readouterr()
    assert ended.value.code == 4
    assert stderr.endswith("error: Speculative decoding changed the target's answers: [16 of 16] differ.\n")
    assert "Traceback" not in stdout + stderr


def test_evaluate_takes_one_recipe_or_compares_two(recipe: Path) -> None:
    for arguments, message in (
        ([str(recipe)] * 2, "Name one recipe"),
        ([str(recipe), "--compare"], "--compare takes two evaluations"),
    ):
        refused = CliRunner().invoke(app, ["evaluate", *arguments])
        assert isinstance(refused.exception, UserError)
        assert message in str(refused.exception)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/there/answers"),
            "/there/answers: Permission denied. Change who",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device. Free some space"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/file/runs"), "/file/runs: Not a directory."),
    ],
)
def test_files_that_cannot_be_written_are_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, said: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("draftsmith.cli.app", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert f"error: {said}" in capsys.readouterr().err


def test_a_user_that_does_not_exist_is_a_folder_that_does_not() -> None:
    assert home_expanded("~nosuchuser/x") == Path("~nosuchuser/x")
    assert home_expanded("~/x") == Path.home() / "x"


def test_other_errors_of_the_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    monkeypatch.setattr("draftsmith.cli.app", fail)
    with pytest.raises(ConnectionResetError):
        main()
