"""What engines need of a GPU: by hand, and for whole runs of an 8B target on a simulated 80 GB GPU."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig

from draftsmith.cli.plan import config_of_target, make_plan
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import EngineConfig, Recipe
from draftsmith.engine.environment import Gpu
from draftsmith.engine.memory import (
    GIB,
    EngineMemory,
    attending_layers,
    cache_bytes,
    engine_memory,
    kv_values,
    kv_values_on_each,
    matrix_weights,
    side_by_side,
    state_bytes,
    weight_bytes,
)
from draftsmith.engine.step_cost import target_sizes
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.lineup import Placement, place

ROOT = Path(__file__).parents[2]
H100 = 79 * GIB
"""What a GPU of "80 GB" has."""


def config(name: str) -> Any:
    fields = json.loads((ROOT / "recipes" / "targets" / f"{name}.json").read_text())
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def split(size: int) -> EngineConfig:
    return EngineConfig(tensor_parallel_size=size)


def test_an_engine_by_hand() -> None:
    llama = config("llama-3.1-8b")
    assert kv_values(llama) == 32 * 2 * 8 * 128
    need = engine_memory(
        llama, target_bytes=16 * 10**9, drafter_bytes=10**9, dtype="bfloat16", tokens=1000, engine=split(2), sequences=1
    )
    assert need.target == 8 * 10**9
    assert need.drafter == 10**9, "every GPU has the whole drafter"
    assert need.kv_cache == 1000 * 32 * 2 * 8 * 128 * 2 * 17 // 16 // 2
    assert need.working == 2 * GIB + 16384 * (6 * 4096 + 3 * 14336) * 2 // 2
    assert need.total == need.target + need.drafter + need.kv_cache + need.working
    assert need.in_words() == "target 7.5, drafter 0.9, KV cache 0.1, working memory 3.0"
    latent = AutoConfig.for_model("deepseek_v3", num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64)
    assert kv_values(latent) == 2 * 576
    # What each process holds: its heads, one at least, and a compressed vector whole.
    assert kv_values_on_each(llama, split(4)) == 32 * 2 * 2 * 128
    assert kv_values_on_each(llama, split(32)) == 32 * 2 * 128
    assert kv_values_on_each(latent, split(8)) == 2 * 576
    need = engine_memory(
        llama,
        target_bytes=16 * 10**9,
        drafter_bytes=0,
        dtype="bfloat16",
        tokens=1000,
        engine=split(4),
        sequences=1,
        extracts=True,
    )
    assert need.target == 4 * 10**9
    assert need.kv_cache == 1000 * 33 * 2 * 2 * 128 * 2


def test_a_cache_in_8_bits_takes_a_byte_for_each_number() -> None:
    llama = config("llama-3.1-8b")
    asked = [
        {},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
    ]
    engines = [EngineConfig(options=options) for options in asked]
    assert [cache_bytes(engine, "float32") for engine in engines] == [4, 4, 2, 1, 1]
    assert cache_bytes(EngineConfig(options={"kv_cache_dtype": "nvfp4"}), "bfloat16") == 2, (
        "too much rather than too little"
    )
    caches = [
        engine_memory(
            llama, target_bytes=1, drafter_bytes=0, dtype="bfloat16", tokens=1000, engine=engine, sequences=1
        ).kv_cache
        for engine in engines
    ]
    assert [size / caches[-1] for size in caches] == [2, 2, 2, 1, 1]
    # More sequences fit into it, so more of their states wait in ordinary memory.
    plain, rounded = (
        state_bytes(llama, layers=4, dtype="bfloat16", engine=engine, kv_cache_bytes=GIB, tokens=10**6)
        for engine in (engines[0], engines[-1])
    )
    assert rounded == pytest.approx(2 * plain, abs=8)


def test_engines_side_by_side_are_counted_by_the_largest() -> None:
    small, large = (EngineMemory(target=size, drafter=0, kv_cache=0, working=0) for size in (5, 10))
    assert side_by_side([small], 100, 0.85) == 17
    assert side_by_side([small, large], 100, 0.85) == 8
    assert side_by_side([large], 11, 0.85) == 0


def test_weights_are_counted_as_they_are_served(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(7, dtype=torch.int8)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert weight_bytes(tmp_path, "bfloat16") == 2 * 17 + 7
    assert weight_bytes(tmp_path, "float32") == 4 * 17 + 7
    eight_bits = {"d": torch.zeros(2, 3, dtype=torch.int8), "d_scale": torch.zeros(2)}
    save_file(eight_bits, tmp_path / "model-3.safetensors")
    assert matrix_weights(tmp_path) == 12 + 6
    assert matrix_weights(tmp_path, only=("a", "b")) == 12
    assert matrix_weights(tmp_path, only=()) == 0
    for damaged in (b"", b"x" * 1000, b"\x02\0\0\0\0\0\0\0[]", b'\x0a\0\0\0\0\0\0\0{"a": {}  }'):
        (tmp_path / "model-2.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match=r"model-2\.safetensors is not a whole safetensors file"):
            weight_bytes(tmp_path, "bfloat16")


def minimal() -> Recipe:
    """The README's recipe, of an 8B target, on one 80 GB GPU."""
    text = (ROOT / "README.md").read_text()
    fields = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    eight = load_recipe(ROOT / "recipes" / "llama-3.1-8b-eagle3.yaml")
    assert eight.plan is not None
    assert eight.plan.hardware is not None
    hardware = eight.plan.hardware.model_copy(update={"count": 1})
    plan = eight.plan.model_copy(update={"hardware": hardware, "conversations": 10_000})
    fields["plan"] = plan.model_dump(mode="json")
    return Recipe.model_validate(fields)


@pytest.mark.parametrize("which", ["llama-3.1-8b-eagle3", "qwen3-8b-eagle3", "minimal"])
def test_a_whole_run_of_an_8b_target_fits_80_gb_gpus(which: str) -> None:
    recipe = minimal() if which == "minimal" else load_recipe(ROOT / "recipes" / f"{which}.yaml")
    stages = make_plan(recipe)["stages"]
    for name in ("extract", "train", "evaluate"):
        needed = sum(stages[name]["memory_bytes"].values())
        assert needed <= stages[name]["memory_limit"] <= H100, f"{name} needs {needed / GIB:.1f} GiB"
    # The baseline and one speculative engine are up together, at least.
    together = [part for part in stages["evaluate"]["memory_bytes"] if part.startswith("target, in")]
    assert int(together[0].split()[2]) >= 2
    # What a step computes with is not in the plan.
    assert recipe.plan is not None
    target = config_of_target(recipe, recipe.plan)
    need = engine_memory(
        target,
        target_bytes=stages["extract"]["memory_bytes"]["target"],
        drafter_bytes=0,
        dtype="bfloat16",
        tokens=1,
        engine=split(1),
        sequences=1,
    )
    token = 2 * kv_values(target, extracts=True)
    room = (stages["extract"]["memory_limit"] - need.total) // token
    assert room >= recipe.engine.max_model_len
    assert room >= 128 * (recipe.plan.prompt_tokens + recipe.plan.response_tokens), "a large batch at once"


def test_an_8b_target_and_small_gpus() -> None:
    """24 GB hold no two engines; four such GPUs do, with the target split in two, and two of 48 GB as they are."""
    llama = config("llama-3.1-8b")

    def placed(count: int, gib: float, gpus_each: int) -> Placement:
        need = engine_memory(
            llama,
            target_bytes=16_060_522_496,
            drafter_bytes=849 * 10**6,
            dtype="bfloat16",
            tokens=4096,
            engine=split(gpus_each),
            sequences=1,
        )
        engine = split(gpus_each)
        gpus = [Gpu(str(number), int(gib * GIB)) for number in range(count)]
        return place(engine, gpus, [need], target="Llama", smaller="evaluate.concurrency")

    with pytest.raises(
        UserError, match=r"Llama .* do not fit .*target 15\.0, drafter 0\.8.* of 23\.6 GiB on the one GPU here"
    ):
        placed(1, 23.6, 1)
    assert placed(4, 23.6, 2).sets == (("0", "1"), ("2", "3"))
    assert not placed(2, 47, 1).together
    assert placed(1, 79, 1).together


def test_weights_that_vllm_does_not_load_are_not_counted(tmp_path: Path) -> None:
    """Mistral's folders have everything twice."""
    for name in ("model-1", "model-2", "consolidated"):
        save_file({name: torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / f"{name}.safetensors")
    assert weight_bytes(tmp_path, "bfloat16") == 40
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"old": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "old.safetensors")
    assert weight_bytes(tmp_path, "bfloat16") == 40
    alone = tmp_path / "alone"
    alone.mkdir()
    save_file({"a": torch.zeros(10, dtype=torch.bfloat16)}, alone / "consolidated.safetensors")
    assert weight_bytes(alone, "bfloat16") == 20


def test_layers_with_a_window_hold_no_more_than_that() -> None:
    """Gemma 3 12B at 131,072 tokens: as if all layers were full, 49 GiB of keys and values for one sequence."""
    kinds = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(48)]
    gemma = AutoConfig.for_model(
        "gemma3_text",
        num_hidden_layers=48,
        hidden_size=3840,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        layer_types=kinds,
        sliding_window=1024,
    )
    about: dict[str, Any] = {
        "target_bytes": 1, "drafter_bytes": 0, "dtype": "bfloat16", "tokens": 131072, "engine": EngineConfig(), "extracts": True,
    }  # fmt: skip
    in_windows = engine_memory(gemma, **about, sequences=1).kv_cache
    assert in_windows == (131072 * 9 + (1024 + 16384) * 40) * 2 * 8 * 256 * 2
    short = engine_memory(gemma, **about | {"tokens": 1000}, sequences=1).kv_cache
    assert (
        short == engine_memory(gemma, **about, sequences=1000).kv_cache * 1000 // 131072 == 1000 * 49 * 2 * 8 * 256 * 2
    )
    # And more sequences, whose states wait in ordinary memory, fit into a cache.
    states = state_bytes(gemma, layers=4, dtype="bfloat16", engine=EngineConfig(), kv_cache_bytes=GIB, tokens=10**9)
    assert states == math.ceil(GIB / (9 * 2 * 8 * 256 * 2) * 4 * 3840 * 2)


@pytest.mark.parametrize(
    ("kind", "fields", "attending"),
    [
        ("llama", {"num_hidden_layers": 4}, 4),
        ("qwen3_next", {"num_hidden_layers": 4}, 1),
        ("nemotron_h", {}, 1),  # of one layer each: linear attention, experts, attention, MLP
        ("falcon_h1", {"num_hidden_layers": 4, "head_dim": 128}, 4),  # attention and linear attention in each
        ("gemma3_text", {"num_hidden_layers": 4}, 4),  # in a window
    ],
)
def test_layers_without_attention_cache_nothing(kind: str, fields: dict[str, Any], attending: int) -> None:
    target = AutoConfig.for_model(kind, **fields)
    full, windowed = attending_layers(target)
    assert len(full + windowed) == attending
    of_one = 2 * target.num_key_value_heads * target.head_dim
    assert kv_values(target) == attending * of_one
    assert kv_values(target, extracts=True) == (attending + 1) * of_one
    about: dict[str, Any] = {"target_bytes": 1, "drafter_bytes": 0, "dtype": "bfloat16", "engine": EngineConfig()}
    assert engine_memory(target, **about, tokens=100, sequences=1).kv_cache == 100 * 2 * attending * of_one
    assert target_sizes(target).attention_width == attending * target.num_attention_heads * target.head_dim


def test_attention_to_the_tokens_that_an_index_finds_caches_all() -> None:
    assert kv_values(AutoConfig.for_model("deepseek_v32", num_hidden_layers=4)) == 4 * (512 + 64)


def test_layers_of_different_sizes() -> None:
    """Gemma 4: the heads of its full-attention layers are wider and fewer. Gemma 3n: a width for each layer's MLP."""
    kinds = ["sliding_attention", "full_attention"]
    gemma = AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=4,
        layer_types=2 * kinds,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_global_key_value_heads=2,
        global_head_dim=128,
        attention_k_eq_v=True,
        sliding_window=512,
    )
    assert kv_values(gemma) == 2 * 2 * (4 * 64 + 2 * 128)
    assert kv_values_on_each(gemma, split(4)) == 2 * 2 * (64 + 128), "one head at least"
    assert target_sizes(gemma).attention_width == 2 * 8 * (64 + 128)
    about: dict[str, Any] = {"target_bytes": 1, "drafter_bytes": 0, "dtype": "bfloat16", "engine": EngineConfig()}
    assert engine_memory(gemma, **about, tokens=1000, sequences=1).kv_cache == 1000 * 2 * kv_values(gemma)

    gemma = AutoConfig.for_model(
        "gemma3n_text", hidden_size=64, intermediate_size=[128, 256], num_hidden_layers=2, layer_types=kinds
    )
    assert engine_memory(gemma, **about, tokens=1, sequences=1).working == 2 * GIB + 16384 * (6 * 64 + 3 * 256) * 2
