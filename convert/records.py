"""What a run's finished stages recorded about its drafter, checked, for its model card; and the card beside the drafter."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.config.evaluation import RESULTS_VERSION
from draftsmith.config.target import TargetConfig
from draftsmith.convert.convert import converted_from
from draftsmith.convert.inspection import inspect
from draftsmith.convert.model_card import render
from draftsmith.convert.quantize import scheme_of
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.engine.speculation import drafter_sha256
from draftsmith.run import stage
from draftsmith.run.atomic_io import read_json, sha256_of, write_bytes
from draftsmith.run.errors import UserError

EVALUATION = ("results.json", "report.html")
"""Files of an evaluation."""


def write_measured_card(run_dir: Path, evaluation: str) -> None:
    """Write the card beside a run's drafter again, with what an evaluation of it measured.

    Args:
        run_dir: `RUNS/NAME`.
        evaluation: the evaluation's folder in it.

    Raises:
        UserError: the evaluation is of another drafter, or the drafter's checkpoint is gone.
    """
    drafter = run_dir / "vllm"
    checkpoint, train, quantized = checkpoint_of(drafter, run_dir / "checkpoint")
    card = render(
        checkpoint,
        TargetConfig.model_validate(train["recipe"]["target"]),
        quantized=quantized,
        train=train,
        extract=extraction_of(run_dir / "store", train),
        evaluate=evaluation_of(drafter, run_dir / evaluation),
        evaluation=f"../{evaluation}",
    )
    write_bytes(drafter / "README.md", card.encode())


def checkpoint_of(drafter: Path, directory: Path) -> tuple[Checkpoint, dict[str, Any], str | None]:
    """The checkpoint that the drafter was converted from, the record of its training, and the scheme of the drafter's weights; both
    directories are checked."""
    converted, train = stage.read(drafter), stage.read(directory)
    if converted is None or converted.get("stage") != "convert":
        raise UserError(
            f"There is no finished drafter in {drafter}. Give a run's folder, as in runs/NAME, after `draftsmith convert`."
        )
    if train is None:
        raise UserError(
            f"There is no finished checkpoint in {directory}, which records how the drafter in {drafter} was made. Keep the two "
            "folders side by side, as `draftsmith run` leaves them."
        )
    report = inspect(drafter)
    if not report["good"]:
        raise UserError(report["damage"]["message"])
    config = read_json(drafter / "config.json")
    quantized = scheme_of(config)
    if converted["inputs"] != converted_from(directory, config.get("torch_dtype", ""), quantized):
        raise UserError(
            f"The drafter in {drafter} was not made from the checkpoint in {directory}, which is newer. Run "
            "`draftsmith convert` with the run's recipe, and `draftsmith evaluate`."
        )
    return Checkpoint.load(directory).check(), train, quantized


def extraction_of(store: Path, train: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of the run's store; None if the store is gone or was made again after training."""
    record = stage.read(store) if store.is_dir() else None
    return record if record and record["finished_at"] <= train["finished_at"] else None


def evaluation_of(drafter: Path, directory: Path) -> dict[str, Any]:
    """The record of the evaluation, whose files are unchanged and which measured this drafter."""
    advice = (
        "Run `draftsmith evaluate` with the run's recipe, or publish without measured numbers: `--without-evaluation`."
    )
    record = stage.read(directory)
    if record is None or record.get("stage") != "evaluate":
        raise UserError(f"There is no finished evaluation in {directory}. {advice}")
    measured, written = record["figures"].get("drafter_sha256"), record.get("files")
    if not measured or not written:
        raise UserError(
            f"The evaluation in {directory} is from an earlier version, which did not record what it measured. {advice}"
        )
    if record["figures"].get("schema_version") != RESULTS_VERSION:
        raise UserError(f"Another version of Draftsmith wrote the evaluation in {directory}. {advice}")
    for name in EVALUATION:
        if not (directory / name).is_file() or sha256_of(directory / name) != written.get(name):
            raise UserError(f"{directory / name} has changed since the evaluation wrote it. {advice}")
    if json.loads((directory / "results.json").read_text()) != record["figures"]:
        raise UserError(f"{directory / stage.MARKER} does not hold the figures of results.json. {advice}")
    if measured != drafter_sha256(drafter):
        raise UserError(
            f"The evaluation in {directory} measured a different drafter from the one in {drafter}. {advice}"
        )
    return record
