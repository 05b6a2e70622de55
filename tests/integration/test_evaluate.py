"""The whole evaluation with real vLLM engines, on a tiny random target and a drafter made for it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.serve.evaluation import lineup
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.serve.evaluation.schema import Results
from tests.integration.conftest import TINY_HEADS, TINY_HIDDEN, TINY_VOCAB, make_target

pytestmark = pytest.mark.integration

DRAFT_VOCAB = 192


def make_drafter(directory: Path, target: Path) -> None:
    """A drafter in vLLM's EAGLE-3 layout that proposes what the target's last state says: right now and then."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(target / "model.safetensors")

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    first_id = 32  # the draft vocabulary is a window of the target's: an offset that vLLM must add
    tensors = {
        "fc.weight": torch.cat([torch.zeros(TINY_HIDDEN, 2 * TINY_HIDDEN), torch.eye(TINY_HIDDEN)], dim=1),
        "layers.0.input_layernorm.weight": torch.ones(TINY_HIDDEN),
        "layers.0.hidden_norm.weight": torch.ones(TINY_HIDDEN),
        "layers.0.post_attention_layernorm.weight": torch.ones(TINY_HIDDEN),
        "layers.0.self_attn.q_proj.weight": random(TINY_HIDDEN, 2 * TINY_HIDDEN),
        "layers.0.self_attn.k_proj.weight": random(TINY_HIDDEN, 2 * TINY_HIDDEN),
        "layers.0.self_attn.v_proj.weight": random(TINY_HIDDEN, 2 * TINY_HIDDEN),
        "layers.0.self_attn.o_proj.weight": torch.zeros(TINY_HIDDEN, TINY_HIDDEN),
        "layers.0.mlp.gate_proj.weight": random(128, TINY_HIDDEN),
        "layers.0.mlp.up_proj.weight": random(128, TINY_HIDDEN),
        "layers.0.mlp.down_proj.weight": torch.zeros(TINY_HIDDEN, 128),
        "norm.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"][first_id : first_id + DRAFT_VOCAB].clone(),
        "d2t": torch.full((DRAFT_VOCAB,), first_id, dtype=torch.int64),
    }
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": TINY_HIDDEN, "intermediate_size": 128, "num_attention_heads": TINY_HEADS,
        "num_key_value_heads": TINY_HEADS, "head_dim": 32, "vocab_size": TINY_VOCAB, "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
        "dtype": "float32", "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def tiny_recipe(folder: Path) -> Recipe:
    def prompts(name: str, count: int) -> dict[str, str]:
        rows = [{"id": f"{name}-{n}", "prompt": f"{name} question number {n * n}?"} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(folder / f"{name}.jsonl")}

    return Recipe.model_validate(
        {
            "name": "tiny",
            "target": {"model": str(folder / "target"), "dtype": "float32"},
            "engine": {"max_model_len": 256, "kv_cache_gib": 0.3},
            "extract": {"prompts": prompts("train", 3), "held_out": prompts("held", 5), "max_tokens": 24},
            "evaluate": {
                "suites": {"held_out": {"prompts": "held_out"}, "other": {"prompts": prompts("other", 3), "max_tokens": 8}},
                "k": [1, 2], "acceptance_k": 2, "step_cost_prompts": 2, "timing_prompts": 2, "timing_tokens": 12, "acceptance_batch_size": 4,
                "concurrency": [2], "engine_starts": 1, "dtypes": ["float32", "bfloat16"],
            },
        }
    )  # fmt: skip


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that waits for its parent does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def counted_engines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many engines are up, after each start of one."""
    up: set[int] = set()
    counts: list[int] = []
    start, close = EngineHost.start, EngineHost.close

    def counted_start(host: EngineHost) -> EngineHost:
        up.add(id(host))
        counts.append(len(up))
        return start(host)

    def counted_close(host: EngineHost) -> None:
        close(host)
        up.discard(id(host))

    monkeypatch.setattr(EngineHost, "start", counted_start)
    monkeypatch.setattr(EngineHost, "close", counted_close)
    return counts


def test_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_target(tmp_path / "target")
    run_dir = tmp_path / "runs" / "tiny"
    lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    methods = {f"lookup {k}": lookup | {"num_speculative_tokens": k} for k in (1, 3, 5)}
    wanted = tiny_recipe(tmp_path).model_dump(mode="json")
    wanted["evaluate"] |= {"k": [1, 2, 3, 4], "methods": methods}
    recipe = Recipe.model_validate(wanted)
    with pytest.raises(UserError, match="no drafter"):
        run_evaluate(recipe, run_dir)
    make_drafter(run_dir / "vllm", tmp_path / "target")

    counts = counted_engines(monkeypatch)
    results = run_evaluate(recipe, run_dir)

    assert max(counts) == results["engine"]["peak_engines"] == 2
    assert len(counts) >= 2 + 3 * len(methods) + 2, (
        "the drafter at every K, three passes with the methods, and both in bfloat16"
    )

    written = json.loads((run_dir / "eval" / "results.json").read_text())
    assert written == results
    TypeAdapter(Results).validate_python(written, strict=True)
    # One engine start: what cannot be the fastest is left out, and what that is depends on the machine.
    assert {"1", "2"} <= set(results["k_curve"]) <= {"1", "2", "3", "4"}
    assert str(results["num_speculative_tokens"]) in results["k_curve"]
    for name, prompts in (("held_out", 5), ("other", 3)):
        suite = results["suites"][name]
        assert suite["prompts"] == prompts
        assert suite["identical_to_baseline"], suite["differences"]
        assert suite["at_k"]["2"]["prompts_identical"] == prompts
        assert suite["at_k"]["2"]["draft_tokens"] == 2 * suite["at_k"]["2"]["drafts"] > 0
        assert len(suite["at_k"]["2"]["acceptance_per_position"]) == 2
        assert suite["tokens_per_second"]["speculative"] / suite["tokens_per_second"]["baseline"] == pytest.approx(
            suite["speedup"]
        )
        assert suite["at_k"]["2"]["fidelity"]["verdict"] == "identical"
        assert suite["control"] is None, "nothing differs"
        # bfloat16 is timed too, and its answers are compared with the baseline in bfloat16.
        assert set(suite["throughput"]["fidelity"]) == {
            *(f"K = {results['num_speculative_tokens']}, {dtype}" for dtype in ("float32", "bfloat16")),
            *(f"{method}, float32" for method in methods),
        }
    for one in results["suites"]["held_out"]["throughput"]["configurations"].values():
        assert one["execution"] == {"model_runner": "V1", "async_scheduling": False}, "as vLLM does on a CPU"
    under_load = results["load"]["2"]
    assert (under_load["in_flight"], under_load["requests"], under_load["engine_starts"]) == (2, 64, 1)
    assert all(one["tokens_per_second"] > 0 for one in under_load["configurations"].values())
    # This drafter is right now and then; a drafter that vLLM fails to load properly never is.
    assert results["suites"]["held_out"]["at_k"]["2"]["accepted"] > 0
    assert "tiny" in (run_dir / "eval" / "report.html").read_text()

    def no_engine(*arguments: object, **named: object) -> None:
        raise AssertionError("an evaluation that is finished must not start engines")

    monkeypatch.setattr(lineup, "start_engines", no_engine)
    assert run_evaluate(recipe, run_dir) == results

    # An engine that cannot start says why, from its log.
    missing = EngineSpec(name="baseline", target=str(tmp_path / "nothing"), dtype="float32", engine=recipe.engine)
    with (
        pytest.raises(DraftsmithError, match="engine `baseline` failed while starting"),
        EngineHost(missing, tmp_path) as host,
    ):
        host.start().wait_ready()


_PARENT = """
import sys
from pathlib import Path
from draftsmith.config.recipe import EngineConfig
from draftsmith.serve.evaluation.engine import EngineSpec, EngineHost

if __name__ == "__main__":
    target, logs = sys.argv[1:]
    config = EngineSpec(name="baseline", target=target, dtype="float32", engine=EngineConfig(max_model_len=512, kv_cache_gib=0.1))
    host = EngineHost(config, Path(logs)).start().wait_ready()
    print(host._process.process.pid, flush=True)
    while True:
        host.generate([[n] * 8 for n in range(32)], max_tokens=400)
"""


def test_a_killed_parent_leaves_no_engine(tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    (tmp_path / "parent.py").write_text(_PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "target"), str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    assert alive(engine)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while alive(engine) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(engine)
