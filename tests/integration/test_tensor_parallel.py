"""An engine of two processes extracts the states that one extracts, one of the two writes them, and drafts are the same."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import EngineConfig, Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.engine.speculation import method_config, own_drafter
from draftsmith.extract import worker
from draftsmith.extract.extract import run_extract
from draftsmith.serve.evaluation import engine as engine_module
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec
from draftsmith.store.reader import Store
from draftsmith.target.info import describe_target
from draftsmith.train.train import run_train
from tests.integration import notes_proposals, notes_writers
from tests.integration.conftest import demo_prompts, make_target, write_recipe
from tests.soak import in_soak

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each of the two processes needs a core"),
]


def extract(folder: Path, processes: int) -> Store:
    """The store of a tiny target in `folder/target`, by an engine of so many processes; the run is `folder/PROCESSES`."""
    if not (folder / "target").exists():
        make_target(folder / "target")
    run_extract(recipe_for(folder, processes), folder / str(processes))
    return Store(folder / str(processes) / "store")


def recipe_for(folder: Path, processes: int) -> Recipe:
    path = write_recipe(
        folder,
        folder / "target",
        demo_prompts(12),
        ["Name three rivers."],
        extract={"max_tokens": 24, "layer_ids": [1, 2, 3]},
        train={
            "drafter": {"kind": "eagle3", "layer_ids": [1, 2, 3]},
            "epochs": 4,
            "tokens_per_step": 256,
            "ttt_steps": 2,
        },
        engine={"tensor_parallel_size": processes},
        evaluate={"k": [1, 2, 3], "acceptance_k": 3},
    )
    return load_recipe(path)


@pytest.mark.usefixtures("every_core")
def test_two_processes_extract_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_child", notes_writers.child)
    one, two = extract(tmp_path, 1), extract(tmp_path, 2)
    for processes, writers in ((1, [True]), (2, [True, False])):
        assert json.loads((tmp_path / str(processes) / "writers.json").read_text()) == writers
    assert len(one) == len(two) > 10
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        torch.testing.assert_close(b.hidden_states, a.hidden_states, rtol=1e-4, atol=1e-4)


@in_soak
@pytest.mark.usefixtures("every_core")
def test_two_processes_draft_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, run_dir, recipe = extract(tmp_path, 1), tmp_path / "1", recipe_for(tmp_path, 1)
    run_train(recipe, run_dir)
    run_convert(recipe, run_dir)
    prompts = [sequence.token_ids[~sequence.loss_mask].tolist() for sequence in store]
    one, two = (_drafts(tmp_path, run_dir, processes, prompts, monkeypatch) for processes in (1, 2))
    assert one == two
    texts, proposals = two
    assert texts == [sequence.token_ids[sequence.loss_mask].tolist() for sequence in store]
    assert len({draft for _, draft in proposals}) > 10, "drafts that are all the same would be so in any engine"


def _drafts(
    folder: Path, run_dir: Path, processes: int, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[int]], list[Any]]:
    """Answers, and every draft with its context in order of contexts."""
    monkeypatch.setattr(engine_module, "_child", notes_proposals.child)
    target = describe_target(folder / "target")
    engine = EngineConfig(max_model_len=512, kv_cache_gib=0.2, tensor_parallel_size=processes)
    method = own_drafter(run_dir / "vllm").model_copy(update={"num_speculative_tokens": 3})
    speculative = method_config(method, target, own_drafter=run_dir / "vllm", tensor_parallel_size=processes)
    spec = EngineSpec(
        name=f"on-{processes}", target=str(target.path), dtype="float32", engine=engine, speculative=speculative
    )
    with EngineHost(spec, folder).start() as host:
        answers, _ = host.wait_ready().generate(prompts, max_tokens=24)
        return [answer.token_ids for answer in answers], sorted(host._call("proposals"))
