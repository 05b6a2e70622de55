"""Stage directories: finished, unfinished, and those that are not Draftsmith's."""

import errno
import subprocess
import sys
import time

import pytest

from draftsmith.run import stage
from draftsmith.run.atomic_io import sha256_of, write_json
from draftsmith.run.errors import UserError
from draftsmith.run.stage import StageRun


def finish(directory, inputs="abc"):
    StageRun("extract", directory).finish(inputs, {"tokens": 3}, recipe={})


def test_finished_only_for_the_same_inputs(tmp_path):
    directory = tmp_path / "store"
    run = StageRun("extract", directory)
    assert run.finished("abc") is None
    stage.claim(directory, fresh=False)
    assert run.finished("abc") is None
    finish(directory)
    assert run.finished("abc") == {"tokens": 3}
    assert run.finished("other") is None
    record = stage.read(directory)
    assert record["figures"] == {"tokens": 3}
    assert record["versions"]["draftsmith"]


def test_a_run_from_claim_to_finish(tmp_path, capsys):
    run = StageRun("convert", tmp_path / "vllm", started=time.time() - 100)
    assert run.finished("abc") is None
    run.claim(fresh=True)
    (run.directory / "model").write_text("weights")
    assert run.finish("abc", {"bytes": 7}, recipe={"dtype": "float32"}, files=("model",)) == {"bytes": 7}
    record = stage.read(run.directory)
    assert (record["stage"], record["inputs"], record["recipe"]) == ("convert", "abc", {"dtype": "float32"})
    assert record["files"] == {"model": sha256_of(run.directory / "model")}
    assert record["wall_seconds"] >= 100
    assert run.finished("other") is None
    assert capsys.readouterr().err == ""
    assert run.finished("abc") == {"bytes": 7}
    assert f"convert: {run.directory} is up to date" in capsys.readouterr().err.replace("\n", "")


def test_claiming_unfinishes_and_keeps_or_clears(tmp_path):
    directory = tmp_path / "store"
    stage.claim(directory, fresh=False)
    (directory / "shard").write_text("x")
    finish(directory)
    stage.claim(directory, fresh=False)
    assert stage.read(directory) is None
    assert (directory / "shard").exists()
    stage.claim(directory, fresh=True)
    assert not (directory / "shard").exists()


def test_nothing_of_another_stage_is_deleted(tmp_path):
    directory = tmp_path / "store"
    stage.claim(directory, fresh=False)
    (directory / "shard").write_text("x")
    finish(directory)
    with pytest.raises(UserError, match="holds what the stage `extract` finished, which `evaluate` would delete"):
        StageRun("evaluate", directory).claim(fresh=True)
    assert (directory / "shard").exists()
    assert stage.read(directory) is not None
    StageRun("extract", directory).claim(fresh=True)
    assert not (directory / "shard").exists()


def test_another_process_is_kept_out_until_the_stage_has_finished(tmp_path):
    run = StageRun("evaluate", tmp_path / "eval")
    run.claim(fresh=True)
    (run.directory / "partial.json").write_text("{}")
    run.claim(fresh=False)  # as a stage that failed and is tried again
    claim = "import sys; from pathlib import Path; from draftsmith.run import stage; stage.claim(Path(sys.argv[1]), fresh=True)"
    command = [sys.executable, "-c", claim, run.directory]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"Another process is writing {run.directory}. Wait for it" in second.stderr
    assert (run.directory / "partial.json").exists()
    run.finish("abc", {}, recipe={})
    subprocess.run(command, check=True)
    failed = StageRun("evaluate", tmp_path / "eval")
    failed.claim(fresh=True)
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode
    del failed
    subprocess.run(command, check=True)
    assert [path.name for path in run.directory.iterdir()] == [stage.OWNER]


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(stage.fcntl, "flock", no_locks)
    run = StageRun("evaluate", tmp_path / "eval")
    run.claim(fresh=True)
    assert run.finish("abc", {}, recipe={}) == {}


def test_a_file_that_changed_unfinishes_where_that_is_asked(tmp_path, capsys):
    run = StageRun("convert", tmp_path / "vllm")
    for damage in (lambda path: path.unlink(), lambda path: path.write_text("weigh")):
        run.claim(fresh=True)
        (run.directory / "model").write_text("weights")
        run.finish("abc", {"bytes": 7}, recipe={}, files=("model",))
        assert run.finished("abc", check_files=True) == {"bytes": 7}
        damage(run.directory / "model")
        assert run.finished("abc") == {"bytes": 7}
        assert run.finished("abc", check_files=True) is None
        assert "is not as it was written" in " ".join(capsys.readouterr().err.split())


def test_a_link_to_a_directory_stays_one_and_nothing_is_deleted_through_it(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "store").symlink_to(disk)
    stage.claim(tmp_path / "store", fresh=True)
    assert (tmp_path / "store").is_symlink()
    (disk / "shard").write_text("of another run")
    stage.claim(tmp_path / "store", fresh=False)
    with pytest.raises(UserError, match="nothing is deleted through a link"):
        stage.claim(tmp_path / "store", fresh=True)
    assert (disk / "shard").exists()
    disk.rename(tmp_path / "unmounted")
    for fresh in (True, False):
        with pytest.raises(UserError, match=r"is a link to .*disk, which is not there"):
            stage.claim(tmp_path / "store", fresh=fresh)


def test_the_commit_is_of_the_checkout_that_has_this_file(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "another project")
    copy = tmp_path / "stage.py"
    copy.write_text("")
    monkeypatch.setattr(stage, "__file__", str(copy))
    assert stage.git_commit() is None
    git("add", "stage.py")
    assert len(stage.git_commit()) == 40


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(UserError, match="not made by Draftsmith"):
            stage.claim(tmp_path, fresh=fresh)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    with pytest.raises(UserError, match="is a file"):
        stage.claim(tmp_path / "thesis.txt", fresh=False)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"inputs": 1, "figures": {}}', '{"inputs": "a", "figures": 0}'])
def test_a_foreign_stage_record_is_refused(tmp_path, text):
    (tmp_path / stage.MARKER).write_text(text)
    with pytest.raises(UserError, match="is not a stage record"):
        stage.read(tmp_path)


def test_writing_replaces_in_one_step(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert path.read_text() == '{\n  "a": 2\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert sha256_of(path) == "c34a422b9e2e50de25cd966dc034dff66d56e60ce9a4fe18e554580455cdd1c6"
