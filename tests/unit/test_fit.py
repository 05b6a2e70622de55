"""Runs that do not fit into the machine's memory are refused with the numbers, before any engine starts."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.cli.fit import check_fits
from draftsmith.config.recipe import EngineConfig, ExtractConfig, Recipe
from draftsmith.engine import fit
from draftsmith.engine.fit import require_extraction, require_two_engines
from draftsmith.engine.memory import GIB
from draftsmith.engine.process import EngineProcess
from draftsmith.run import machine_memory, stage
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.serve.tune import run_tune
from tests.unit.fake_engine import make_recipe_and_run, pretend_gpu

CONFIG = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8)
STEP = (6 * 1024 + 3 * 4096) * 4
"""Bytes of a token's activations in float32."""


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the memory that the machine seems to have free, in GiB."""
    return lambda gib: monkeypatch.setattr(fit, "available_memory", lambda: None if gib is None else int(gib * GIB))


def two(kv_cache_gib: float, target_gib: float, drafter_gib: float) -> None:
    require_two_engines(
        EngineConfig(kv_cache_gib=kv_cache_gib),
        CONFIG,
        target="big",
        target_bytes=int(target_gib * GIB),
        drafter_bytes=int(drafter_gib * GIB),
        dtype="float32",
    )


def test_two_engines_by_hand(available: Any) -> None:
    each = 0.5 + 4096 * STEP / GIB  # the process, and a prefill step
    needed = 4 + 2 * 6 + 1 + 2 * each  # the cache is shared; weights twice, the drafter once
    available(needed + 0.01)
    two(4, 6, 1)
    available(None)
    two(4, 6, 1)
    available(needed - 0.01)
    with pytest.raises(UserError) as refused:
        two(4, 6, 1)
    assert "\n" not in str(refused.value)
    for part in (
        "a drafter for big does not fit",
        f"2 engines side by side need about {needed:.1f} GiB",
        "target 6.0, drafter 1.0, KV cache 2.0",
        f"{needed - 0.01:.1f} GiB are available",
        "Lower engine.kv_cache_gib",
    ):
        assert part in str(refused.value)


def test_extraction_by_hand(available: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"path": "p.jsonl"}

    def extraction(**options: Any) -> None:
        require_extraction(
            EngineConfig(kv_cache_gib=4, max_model_len=2048),
            ExtractConfig.model_validate({"prompts": prompts, **options}),
            CONFIG,
            target="big",
            target_bytes=6 * GIB,
            dtype="float32",
            layers=4,
        )

    # Keys and values of one layer more than the target's, and the states of as many tokens as the cache holds then.
    states = 4 * (4 * 1024) / (3 * 2 * 1024)
    each = 6 + 0.5 + 4096 * STEP / GIB + states
    available(4 + each + 0.01)
    extraction()
    with pytest.raises(UserError, match=r"2 engines side by side need.*Lower extract\.workers, engine\.kv_cache_gib"):
        extraction(workers=2)
    available(4 + each - 0.01)
    with pytest.raises(
        UserError, match=r"one engine needs about .* GiB \(target 6\.0.*Lower engine\.kv_cache_gib, choose"
    ):
        extraction()
    extraction(max_num_batched_tokens=64)

    # On a GPU: weights, and keys and values of one sequence at its longest, within vLLM's share.
    least = 6 + 2048 * 3 * 2 * 1024 * 4 / GIB
    pretend_gpu(monkeypatch, gib=(least + 0.01) / 0.85)
    extraction()
    pretend_gpu(monkeypatch, gib=(least - 0.01) / 0.85)
    with pytest.raises(UserError, match=rf"needs at least {least:.1f} GiB on each of its GPUs.*tensor_parallel_size"):
        extraction()


def test_beside_a_gpu_the_states_need_ordinary_memory(available: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def extraction(**options: Any) -> None:
        given = {"prompts": {"path": "p.jsonl"}, "max_num_seqs": 64, **options}
        require_extraction(
            EngineConfig(max_model_len=2048),
            ExtractConfig.model_validate(given),
            CONFIG,
            target="big",
            target_bytes=6 * GIB,
            dtype="float32",
            layers=4,
        )

    # 64 sequences at their longest: 2 GiB of states, and 1 GiB to copy through.
    pretend_gpu(monkeypatch, gib=80)
    available(3.01)
    extraction()
    available(None)
    extraction()
    available(2.99)
    with pytest.raises(UserError) as refused:
        extraction()
    assert "\n" not in str(refused.value)
    for part in (
        "Extraction from big does not fit into this machine's ordinary memory",
        "one engine keeps up to 3.0 GiB",
        "(2.0, and 1.0 to copy through)",
        "3.0 GiB are available",
        "Lower extract.max_num_seqs",
    ):
        assert part in str(refused.value)
    extraction(max_num_seqs=32)
    available(5.99)
    with pytest.raises(
        UserError, match=r"2 engines keep up to 6\.0 GiB.*\(each 2\.0.*Lower extract\.workers, extract\.max"
    ):
        extraction(workers=2)

    # No more tokens than the KV cache holds: 0.75 GiB beside the weights, CUDA and a step, for three layers' keys and values.
    pretend_gpu(monkeypatch, gib=(6 + 2 + 16384 * STEP / GIB + 0.75) / 0.85)
    available(1.51)
    extraction()
    available(1.49)
    with pytest.raises(UserError, match=r"up to 1\.5 GiB"):
        extraction()


def test_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "_SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path)
    assert machine_memory.available_memory() is None
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * 1024**2} kB\nMemFree: 2 kB\nMemAvailable: {32 * 1024**2} kB\n")
    assert machine_memory.available_memory() == 32 * GIB
    # A container's limit; files in its cache are given back when programs need the memory.
    for name, text in {
        "memory.max": 8 * GIB,
        "memory.current": 7 * GIB,
        "memory.stat": f"anon 9\ninactive_file {4 * GIB}",
    }.items():
        (tmp_path / name).write_text(str(text))
    assert machine_memory.available_memory() == 5 * GIB
    (tmp_path / "memory.max").write_text("max")
    assert machine_memory.available_memory() == 32 * GIB
    (tmp_path / "memory.max").write_text(str(128 * GIB))
    assert machine_memory.available_memory() == 32 * GIB, "the limit is of a container, the machine has less"


def test_evaluation_and_tuning_are_refused_before_an_engine_starts(
    available: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run_dir = make_recipe_and_run(tmp_path)
    monkeypatch.setattr(EngineProcess, "__init__", no_engine)
    recipe = recipe.model_copy(update={"extract": recipe.extract.model_copy(update={"max_tokens": 20})})
    available(2.5)  # the cache alone fits
    for run in (run_evaluate, run_tune):
        with pytest.raises(UserError, match=r"drafter for target does not fit into this machine's memory: 2 engines"):
            run(recipe, run_dir)


def no_engine(*arguments: Any, **named: Any) -> None:
    raise AssertionError("an engine was started")


def test_a_run_of_64_gib_is_refused_before_extraction(
    available: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run_dir = make_recipe_and_run(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    monkeypatch.setattr(EngineProcess, "__init__", no_engine)
    available(20)
    runs = tmp_path / "runs"

    def run(*options: str) -> Any:
        return CliRunner().invoke(app, ["run", str(path), "--runs", str(runs), *options])

    started = time.monotonic()
    refused = run("-s", "engine.kv_cache_gib=64")
    assert time.monotonic() - started < 20
    assert isinstance(refused.exception, UserError)
    assert "Extraction from target does not fit into this machine's memory: one engine needs about 64." in str(
        refused.exception
    )
    assert not runs.exists(), "nothing was begun"

    # What is finished needs no memory: then evaluation is what does not fit.
    (runs / "run").mkdir(parents=True)
    (runs / "run" / "store").symlink_to(run_dir / "store")
    assert stage.read(runs / "run" / "store") is not None
    refused = run("-s", "engine.kv_cache_gib=64")
    assert "a drafter for target does not fit into this machine's memory: 2 engines side by side need about 65." in str(
        refused.exception
    )

    # Weights count as they are served: 10 GiB in bfloat16 are 20 in float32.
    available(11)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [5, GIB], "data_offsets": [0, 10 * GIB]}}).encode()
    with (tmp_path / "target" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 10 * GIB)
    refused = run("-s", "extract.prompts.limit=2", "-s", "target.dtype=bfloat16")
    assert "KV cache" in str(refused.exception)
    assert "target 10.0" in str(refused.exception)
    refused = run("--plan", "-s", "plan.conversations=10", "-s", "extract.max_tokens=64")
    assert refused.exception is None
    assert "this machine:" not in refused.output, "by the config the target is tiny"


def test_a_plan_says_what_does_not_fit(available: Any, tmp_path: Path) -> None:
    recipe, _ = make_recipe_and_run(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    available(20)
    options = ["run", str(path), "--plan", "-s", "plan.conversations=10", "-s", "extract.max_tokens=64"]
    said = CliRunner().invoke(app, [*options, "-s", "engine.kv_cache_gib=64"])
    assert said.exit_code == 0
    assert "this machine: Extraction from target does not fit into this machine's memory" in said.output
    assert "this machine:" not in CliRunner().invoke(app, options).output
    planned = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert planned["misfit"] is None
    assert (
        planned["stages"]["evaluate"]["memory_bytes"]["KV caches"]
        == Recipe.model_validate(yaml.safe_load(path.read_text())).engine.kv_cache_gib * GIB
    )


def test_a_run_fits_in_every_dtype_that_is_timed(available: Any, tmp_path: Path) -> None:
    recipe, _ = make_recipe_and_run(tmp_path)
    target = recipe.target.model_copy(update={"dtype": "bfloat16"})
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, GIB], "data_offsets": [0, 4 * GIB]}}).encode()
    with (tmp_path / "target" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * GIB)

    def check(*dtypes: str) -> None:
        evaluate = recipe.evaluate.model_copy(update={"dtypes": list(dtypes)})
        changed = recipe.model_copy(update={"target": target, "evaluate": evaluate})
        config = AutoConfig.from_pretrained(tmp_path / "target")
        check_fits(changed, config, tmp_path / "target", extraction=False)

    available(
        2 * 4 + recipe.engine.kv_cache_gib + 4
    )  # twice the weights, the cache, and what else there is; not twice 8 GiB
    check("bfloat16")
    with pytest.raises(UserError, match=r"2 engines side by side.*target 8\.0"):
        check("bfloat16", "float32")
