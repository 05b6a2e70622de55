"""The store as training reads it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.run.errors import UserError
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.train.data import TrainingData, store_dirs
from tests.unit.tiny_run import make_recipe, make_run


def test_the_run_s_own_store_is_not_among_the_others(tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path, drafter={"kind": "eagle3"}, extra_stores=[{"path": str(tmp_path / "other" / ".." / "store")}]
    )
    with pytest.raises(UserError, match="the run's own store"):
        store_dirs(recipe, tmp_path)
    assert store_dirs(recipe, tmp_path / "another") == [
        tmp_path / "another" / "store",
        tmp_path / "other" / ".." / "store",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_states_travel_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, dropout: float
) -> None:
    """To a GPU from pinned memory; there they become what they would have been on the CPU."""
    make_run(tmp_path)
    given = Store(tmp_path / "run" / "store")
    (tmp_path / "half").mkdir()
    with StoreWriter(tmp_path / "half", replace(given.identity, dtype="bfloat16"), shard_tokens=1000) as writer:
        for sequence in given:
            writer.append(replace(sequence, hidden_states=sequence.hidden_states.bfloat16()))
        writer.close()
    pinned: list[torch.dtype] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.dtype) or tensor)
    recipe = make_recipe(tmp_path)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"state_dropout": dropout})})
    store, scales = Store(tmp_path / "half"), [4.0, 0.5]
    accelerator = SimpleNamespace(num_processes=1, process_index=0, device=torch.device(device))
    data = TrainingData(recipe, accelerator, store, [0, 2], 2, 2, scales)  # type: ignore[arg-type]
    rows = store.rows(held_out=False)[:2]
    (found,) = data.micro_batches(0, rows)
    assert bool(pinned) == (device == "cuda")
    assert all(tensor.is_contiguous() for tensor in vars(found.batch).values()), "a GPU copies nothing else by itself"
    assert found.batch.hidden_states.dtype == (torch.float32 if dropout else torch.bfloat16)
    assert found.batch.last_states is not None
    assert found.batch.last_states.dtype == torch.bfloat16

    accelerator.device = torch.device("cpu")
    batch = data.on_device(found.batch)
    stored = torch.cat([store[row].hidden_states for row in rows]).float()
    expected = stored[:, [0, 2]] / torch.tensor(scales)[:, None]
    kept = batch.hidden_states != 0
    torch.testing.assert_close(batch.hidden_states, expected * kept / (1 - dropout), rtol=1e-6, atol=0)
    assert 0.7 < kept.float().mean() <= 1 - dropout / 2
    assert batch.last_states is not None
    assert torch.equal(batch.last_states, stored[:, 2])
