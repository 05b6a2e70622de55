"""Stores that others train on: speculators' own data set class reads an exported one, and its drafter takes a step on it."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.run.errors import UserError
from draftsmith.store.exchange import export_store
from draftsmith.store.reader import Store
from tests.benchmarks.peer_speculators import environment
from tests.unit.tiny_run import VOCAB, make_run

pytestmark = pytest.mark.integration
DRIVER = Path(__file__).with_name("speculators_data.py")


def read_by_speculators(folder: Path, job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What speculators' data set class returns for each row, by `SPLIT.NUMBER.NAME`; see `speculators_data.py`."""
    try:
        python = environment()
    except UserError as error:
        pytest.skip(str(error))
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run([python, DRIVER, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "rows.safetensors")


def test_speculators_train_on_an_exported_store(tmp_path: Path) -> None:
    store = Store(make_run(tmp_path) / "store")
    figures = export_store(store, "speculators", tmp_path / "data")
    layer_ids = list(store.identity.layer_ids[:-1])
    job = {
        "data": str(tmp_path / "data"), "train_data_ratio": figures["train_data_ratio"], "target": str(tmp_path / "target"),
        "layer_ids": layer_ids, "vocab_size": VOCAB, "draft_vocab_size": 40,
    }  # fmt: skip
    rows = read_by_speculators(tmp_path, job)
    for split, held_out in (("train", False), ("val", True)):
        indices = store.rows(held_out=held_out)
        assert f"{split}.{len(indices)}.input_ids" not in rows
        for number, index in enumerate(indices):
            expected, count = store[index], store.length(index)
            row = {
                name: rows[f"{split}.{number}.{name}"]
                for name in ("input_ids", "loss_mask", "hidden_states", "verifier_last_hidden_states")
            }
            assert row["input_ids"].tolist() == expected.token_ids[:count].tolist()
            assert row["loss_mask"].tolist() == expected.loss_mask[:count].tolist()
            assert torch.equal(row["hidden_states"], expected.hidden_states[:, :-1].flatten(1))
            assert torch.equal(row["verifier_last_hidden_states"], expected.hidden_states[:, -1])
    first, second = json.loads((tmp_path / "losses.json").read_text())
    assert math.isfinite(first)
    assert math.isfinite(second)
    assert first != second, "the step changed the weights"
