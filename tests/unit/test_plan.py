"""`draftsmith run --plan`: its arithmetic against hand counts, real modules and measured runs."""

import json
import math
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from draftsmith.cli import app
from draftsmith.cli.plan import config_of_target, drafter_on_meta, make_plan
from draftsmith.cli.plan_engines import plan_evaluate
from draftsmith.cli.plan_report import report, summary
from draftsmith.cli.plan_stage import conversation_counts
from draftsmith.cli.plan_training import flop_of_muon, flop_of_row, kept_by_row, plan_train
from draftsmith.config.hardware import Assumptions, Hardware
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.config.training import StoreFolder
from draftsmith.drafters import dflash, eagle, eagle3, medusa, mlp_speculator, p_eagle
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.init import blocks, induction, least_squares, parallel
from draftsmith.engine.step_cost import EngineStep, TargetSizes, flop_of_text, target_sizes
from draftsmith.run.errors import UserError
from draftsmith.run.stage import StageRun
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.target.pretrained import language_config
from draftsmith.target.tensors import TargetTensors
from draftsmith.train import loss as loss_module
from draftsmith.train.data import TrainingData
from draftsmith.train.loss import BlockLoss, ChainLoss, rows_at_once
from draftsmith.train.muon import orthogonalize
from draftsmith.train.packing import pack
from tests.gpu import training_step
from tests.unit.test_store import identity

RECIPES = Path(__file__).parents[2] / "recipes"
PLANNED = [path for path in sorted(RECIPES.glob("*.yaml")) if "\nplan:" in path.read_text()]


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a plan must not need the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_a_recipe_says_on_top_what_its_plan_prints(path: Path) -> None:
    recipe = load_recipe(path)
    plan = make_plan(recipe)
    json.dumps(plan)
    top = path.read_text().split("\nname:")[0]
    expected = "\n".join(f"#   {line}" for line in summary(plan))
    assert expected in top, f"the expected cost on top of {path.name} is to be:\n{expected}"
    for name, stage in plan["stages"].items():
        if stage["memory_limit"]:
            assert sum(stage["memory_bytes"].values()) < stage["memory_limit"], name
            assert stage["more"].get("initialization", {}).get("memory_bytes", 0) < stage["memory_limit"]

    assert recipe.plan is not None
    config = config_of_target(recipe, recipe.plan)
    drafter = drafter_on_meta(recipe, config, tuple(plan["stages"]["extract"]["more"]["layer_ids"]))
    assert {name: tuple(value.shape) for name, value in drafter.state_dict().items()} == drafter.shapes(drafter.config)
    assert plan["stages"]["convert"]["more"]["parameters"] == sum(p.numel() for p in drafter.parameters())


def test_targets_have_the_parameters_they_are_known_for() -> None:
    def sizes(name: str) -> TargetSizes:
        fields = json.loads((RECIPES / "targets" / f"{name}.json").read_text())
        return target_sizes(AutoConfig.for_model(fields.pop("model_type"), **fields))

    # Two norms per layer and one at the end; Qwen3 has two more per layer, of head size.
    llama = sizes("llama-3.1-8b")
    assert llama.parameters == 8_030_261_248
    assert llama.multiplied == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert llama.attention_width == 32 * 4096
    assert llama.kv_values == 32 * 2 * 8 * 128
    assert sizes("llama-3.3-70b").parameters == 70_553_706_496
    assert sizes("qwen3-8b").parameters == 8_190_735_360
    tied = sizes("smollm2-135m")
    assert tied.parameters == 134_515_008
    assert tied.multiplied == 134_515_008 - 61 * 576, "the table is the head"
    experts = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        vocab_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    attention, router, expert = 32 * (32 + 16 + 16 + 32), 32 * 8, 3 * 32 * 16
    found = target_sizes(experts)
    others = 2 * (attention + router) + 64 * 32
    assert found.multiplied == others + 2 * 2 * expert
    # A step reads the experts of all its tokens: of one token two of eight, of many all.
    assert found.weights_read(1) == pytest.approx(found.multiplied)
    assert found.weights_read(2) == pytest.approx(others + 2 * 8 * expert * (1 - (6 / 8) ** 2))
    assert found.weights_read(1000) == pytest.approx(others + 2 * 8 * expert)
    steps = [EngineStep(found, 2, devices=1, sequences=1, context=0, tokens=tokens).bytes_read() for tokens in (1, 4)]
    assert steps[1] > 1.2 * steps[0]
    assert sizes("llama-3.1-8b").weights_read(64) == llama.multiplied


def test_evaluation_needs_no_more_than_a_window() -> None:
    drafter, _ = _tiny("eagle3")
    recipe, assumed = _recipe("eagle3"), Assumptions(prompt_tokens=1 << 20, response_tokens=20, conversations=50)
    engine = recipe.engine.model_copy(update={"max_model_len": 1 << 20})
    recipe = recipe.model_copy(update={"engine": engine})
    fields: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    planned = []
    for kinds in (["full_attention"] * 2, ["sliding_attention", "full_attention"]):
        config = AutoConfig.for_model("gemma3_text", layer_types=kinds, **fields)
        stage = plan_evaluate(recipe, assumed, target_sizes(config), drafter, config)
        planned.append(stage.memory_bytes["KV caches"])
    assert planned[1] == pytest.approx(planned[0] / 2, rel=0.05)


def test_a_lookup_multiplies_nothing() -> None:
    """Gemma 3n has a table for each layer beside the one that is its head too."""
    fields = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_kv_shared_layers": 0}
    small, large = (
        target_sizes(AutoConfig.for_model("gemma3n_text", **fields, vocab_size_per_layer_input=rows))
        for rows in (100, 300)
    )
    assert large.parameters - small.parameters == 200 * 2 * 256
    assert large.multiplied == small.multiplied


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("hunyuan_v1_moe", {"head_dim": 8, "intermediate_size": 16, "num_experts": 8, "moe_topk": [2, 2]}),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "moe_intermediate_size": 16, "top_k_experts": 2}),
    ],
)
def test_experts_by_each_familys_name_for_those_that_a_token_goes_to(kind: str, fields: dict[str, Any]) -> None:
    sizes = target_sizes(AutoConfig.for_model(kind, hidden_size=32, num_hidden_layers=2, vocab_size=64, **fields))
    assert sizes.experts == 2 * 8 * 3 * 32 * 16
    assert sizes.routed_experts == sizes.experts // 4


def test_engine_arithmetic() -> None:
    sizes = TargetSizes(parameters=1100, multiplied=1000, attention_width=10, kv_values=4)
    assert flop_of_text(sizes, first=0, last=100) == 100 * 2000 + 4 * 10 * (100 * 100 / 2)
    assert flop_of_text(sizes, first=60, last=100) == pytest.approx(
        flop_of_text(sizes, first=0, last=100) - flop_of_text(sizes, first=0, last=60)
    )
    step = EngineStep(sizes, 2, devices=2, sequences=8, context=50, tokens=3)
    assert step.flop() == 8 * 3 * (2000 + 4 * 10 * 50)
    assert step.bytes_read() == 2 * (1000 + 8 * 50 * 4)
    assert replace(step, cached=1).bytes_read() == 2 * 1000 + 8 * 50 * 4
    rates = {
        "device": "x",
        "store_mb_per_second": 1,
        "load_mb_per_second": 1,
        "prefill_utilization": 1,
        "train_utilization": 1,
    }
    computes = Hardware(matmul_tflops=1e-6, memory_gb_per_second=1, decode_utilization=0.5, **rates)
    assert step.seconds(computes) == pytest.approx(step.flop() / (2 * 1e6) / 0.5)
    reads = Hardware(matmul_tflops=1, memory_gb_per_second=1e-6, decode_utilization=0.5, **rates)
    assert step.seconds(reads) == pytest.approx(step.bytes_read() / (2 * 1e3) / 0.5)


@pytest.mark.parametrize(("hardware", "slower"), [("cpu-2-cores-bf16", 2), ("h100-80gb", 16), ("cpu-2-cores", 1)])
def test_products_in_float32_are_slower_on_hardware_with_bfloat16(hardware: str, slower: float) -> None:
    drafter, _ = _tiny("eagle3")
    assumed = Assumptions(prompt_tokens=10, response_tokens=20, conversations=50, hardware=hardware)
    passes = []
    for precision in (None, "bfloat16", "float32"):
        recipe = _recipe("eagle3")
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
        plan = plan_train(recipe, assumed, drafter, layers=3)
        passes.append(plan.seconds["forward and backward passes"])
    left_open, narrow, wide = passes
    assert wide == pytest.approx(slower * narrow)
    assert left_open == min(passes)


def test_stores_of_other_runs_are_trained_on_too(tmp_path: Path) -> None:
    drafter, _ = _tiny("eagle3")
    recipe = _recipe("eagle3")
    extra = recipe.train.model_copy(update={"extra_stores": (StoreFolder(path=str(tmp_path / "store")),)})
    both = recipe.model_copy(update={"train": extra})
    assumed = Assumptions(prompt_tokens=10, response_tokens=20, conversations=50)
    alone, missing = (plan_train(one, assumed, drafter, layers=3) for one in (recipe, both))
    assert missing.tokens == alone.tokens
    # Of 100 conversations with 9,000 tokens, 6,000 of them answers, a tenth is held out.
    figures = {"sequences": 100, "held_out_sequences": 10, "tokens": 9000, "response_tokens": 6000}
    (tmp_path / "store").mkdir()
    run = StageRun("extract", tmp_path / "store", started=0)
    run.claim(fresh=True)
    run.finish("inputs", {"parameters": 5}, recipe={})
    with pytest.raises(UserError, match=r"is not a store: it holds what the stage `extract` made"):
        plan_train(both, assumed, drafter, layers=3)
    run.finish("inputs", figures, recipe={})
    planned = plan_train(both, assumed, drafter, layers=3)
    assert planned.tokens - alone.tokens == round(8100 * recipe.train.epochs)
    assert planned.flop > alone.flop


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (300, 520), (576, 576)])
def test_muon(shape: tuple[int, int], precision: Literal["float32", "bfloat16"]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize([torch.randn(shape)], getattr(torch, precision))
    assert counter.get_total_flops() == pytest.approx(flop_of_muon(*shape, precision, "cpu"))
    whole, long = flop_of_muon(*shape, "float32", "cuda"), max(shape)
    assert whole == 17 * 2 * min(shape) ** 3 + 2 * 2 * min(shape) ** 2 * long, (
        "a GPU computes all of a symmetric product"
    )


Shape = Several[int]

KINDS = {
    "eagle": {},
    "eagle3": {},
    "eagle3 of two layers": {"num_layers": 2},
    "p_eagle": {"num_layers": 2, "num_depths": 3},
    "dflash": {"block_size": 4},
    "dspark": {"block_size": 4},
    "dspark from the anchor": {"block_size": 3, "sample_from_anchor": True},
    "medusa": {"num_heads": 3, "num_layers": 2},
    "mlp_speculator": {"n_predict": 3},
    "mlp_speculator, steps of their own": {"n_predict": 3, "tie_weights": False, "inner_size": 20},
}


OF_MASKS = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_that_the_module_does(kind: str) -> None:
    """Exact FLOP of the forward pass of all draft steps; activations kept for the backward pass within a factor of two."""
    drafter, batch = _tiny(kind, **KINDS[kind])
    rows = int((batch.loss_weights.sum(1) > 0).sum())
    assert 0 < rows < len(batch.positions)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        steps = list(drafter.chain(batch, steps=3))
    found = sum(flop for op, flop in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op))
    shapes, passes = drafter.shapes(drafter.config), drafter.matmul_counts(drafter.config, 3)
    uses = {name: rows * often + (len(batch.positions) - rows) * seldom for name, (seldom, often) in passes.items()}
    if kind == "p_eagle":  # and once for all rows and both later steps, what the masks read
        uses = {name: times + (name in ("fc.weight", *OF_MASKS)) for name, times in uses.items()}
    assert found == sum(2 * shapes[name][0] * shapes[name][1] * times for name, times in uses.items())
    assert len(steps) == 3
    shared = {buffer.untyped_storage().data_ptr() for buffer in drafter.buffers()}
    measured = sum(size for pointer, size in kept.items() if pointer not in shared)
    assert 0.5 < rows * kept_by_row(drafter, 3, layers=3, number=4) / measured < 2


def _loss(drafter: Drafter, recipe: Recipe) -> ChainLoss:
    terms, width = drafter.loss_terms(recipe.train.drafter), drafter.config.hidden_size
    return (BlockLoss if terms.in_blocks else ChainLoss)(
        drafter,
        teacher_norm=torch.nn.RMSNorm(width),
        teacher_head=torch.ones(len(drafter.draft_token_ids), width),
        ttt_steps=3,
        ttt_loss_decay=1.0,
        terms=terms,
    )


@pytest.mark.parametrize("kind", ["p_eagle", "dflash", "dspark"])
def test_the_teachers_products_are_those_that_the_loss_does(kind: str) -> None:
    """In a chain one for each row, in blocks one for each draft token; the ends of texts have fewer tokens to draft."""
    drafter, batch = _tiny(kind, **KINDS[kind])
    rows, width = int((batch.loss_weights.sum(1) > 0).sum()), drafter.config.hidden_size
    counted, planned = [], []
    for targets in ("tokens", "distribution"):
        recipe = _recipe(kind, **KINDS[kind], targets=targets)
        loss = _loss(drafter, recipe)
        with FlopCounterMode(display=False) as counter:
            loss(replace(batch, last_states=torch.ones(len(batch.positions), width)))
        counted.append(counter.get_total_flops())
        planned.append(rows * flop_of_row(recipe, drafter, 3, predicts=True))
    assert 0.8 < (counted[1] - counted[0]) / (planned[1] - planned[0]) <= 1


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_the_heads_products_are_those_that_the_loss_does(kind: str) -> None:
    """Of a frozen head the gradient of its input alone, beside a Markov head that is trained too; the ends of texts have fewer tokens to
    draft."""
    drafter, batch = _tiny(kind, **KINDS[kind])
    rows, width = int((batch.loss_weights.sum(1) > 0).sum()), drafter.config.hidden_size
    recipe = _recipe(kind, **KINDS[kind])
    passes = drafter.matmul_counts(drafter.config, 3)
    layers = sum(6 * math.prod(drafter.shapes(drafter.config)[name]) * often for name, (_, often) in passes.items())
    with FlopCounterMode(display=False) as chain:
        list(drafter.chain(batch, steps=3))
    counted, planned = [], []
    for trained in (True, False):
        for head in drafter.head_parameters():
            head.requires_grad_(trained)
        loss = _loss(drafter, recipe)
        with FlopCounterMode(display=False, custom_mapping=NO_PRODUCTS) as counter:  # with the gradients of heads
            loss(replace(batch, last_states=torch.ones(len(batch.positions), width)))
        counted.append(counter.get_total_flops() - chain.get_total_flops())
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"train_lm_head": trained})})
        planned.append(rows * (flop_of_row(changed, drafter, 3, predicts=True) - layers))
    assert 0.8 < counted[1] / planned[1] <= 1
    assert 0.8 < (counted[0] - counted[1]) / (planned[0] - planned[1]) <= 1


STEPS = {
    "eagle3": ("smollm2-eagle3", []),
    "p_eagle": ("smollm2-p-eagle", []),
    "dflash": ("smollm2-dflash", []),
    "dspark": ("smollm2-dspark", []),
    "dspark, published loss": (
        "smollm2-dspark",
        [
            f"train.drafter.{key}={value}"
            for key, value in {
                "enable_confidence_head": "true",
                "token_weight": 0.1,
                "variation_weight": 0.9,
                "acceptance_alpha": "null",
                "targets": "tokens",
            }.items()
        ],
    ),
}


@pytest.mark.parametrize("hardware", ["cpu-2-cores", "h100-80gb"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_the_memory_that_the_plan_says(name: str, hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward pass and gradients, within a third; computed on a CPU, with the chunks of logits of the hardware."""
    monkeypatch.setattr(loss_module, "rows_at_once", partial(_rows_at_once_on, "cuda" if "h100" in hardware else "cpu"))
    file, settings = STEPS[name]
    options = {"tokens_per_step": 784, "precision": "float32", "prompt_loss_weight": 0, "loss_vocab_size": "null"}
    overrides = [f"train.{key}={value}" for key, value in options.items()]
    overrides += [f"plan.hardware={{preset: {hardware}}}", *settings]
    recipe = load_recipe(RECIPES / f"{file}.yaml", overrides)
    assumed = recipe.plan
    assert assumed is not None
    loss = training_step.make_loss(recipe, assumed, torch.device("cpu"))
    batch = training_step.make_batch(loss.drafter, 784, 196, round(assumed.prompt_tokens), loss.ttt_steps)
    batch = training_step.with_trained_rows(recipe, batch).to_dtype(torch.bfloat16)

    def step() -> None:
        loss(batch.to_dtype(torch.float32)).loss.backward()

    planned = plan_train(recipe, assumed, loss.drafter, layers=len(loss.drafter.config.layer_ids)).memory_bytes
    expected = sum(planned[part] for part in ("activations", "the loss", "gradients"))
    assert 3 / 4 < _peak_bytes(step) / expected < 4 / 3


def _rows_at_once_on(device: str, vocab: int, _: str) -> int:
    return rows_at_once(vocab, device)


def _cholesky(shape: Shape, *_: Any, out_shape: Any = None, **__: Any) -> float:
    return shape[0] ** 3 / 3


def _triangular(shape: Shape, wanted: Shape, *_: Any, out_shape: Any = None, **__: Any) -> float:
    return float(shape[0] ** 2 * wanted[1])


def _lu(shape: Shape, wanted: Shape, *_: Any, out_shape: Any = None, **__: Any) -> float:
    return 2 / 3 * shape[0] ** 3 + 2 * shape[0] ** 2 * wanted[1]


def _eigenvectors(shape: Shape, *_: Any, out_shape: Any = None, **__: Any) -> float:
    return 9.0 * shape[0] ** 3


def _added_product(_: Shape, a: Shape, b: Shape, *__: Any, out_shape: Any = None, **___: Any) -> float:
    return 2.0 * a[0] * a[1] * b[1]


NO_PRODUCTS = {
    torch.ops.aten.linalg_cholesky_ex: _cholesky, torch.ops.aten.linalg_solve_triangular: _triangular,
    torch.ops.aten._linalg_solve_ex: _lu, torch.ops.aten._linalg_eigh: _eigenvectors, torch.ops.aten.addmm_: _added_product,
}  # fmt: skip
"""Operations that torch's counter leaves out."""
STARTS = {**KINDS, "eagle3 without a free head": {}, "medusa of one head": {"shared_head": True}}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_takes_what_its_kind_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOP, memory and rows read of an initialization that reads part of a small target's store."""
    heads = {"num_key_value_heads": 8} if "free head" in name else {}
    drafter, _ = _tiny(name, hidden=128, heads=8, **heads, **STARTS[name])
    limits = {
        "ROWS_TO_FIT": 1000,
        "ROWS_AT_ONCE": 64,
        "ROWS_TO_LOOK_UP": 500,
        "ANCHORS_TO_FIT": 600,
        "ANCHORS_TO_COMPARE": 200,
    }
    for module in (blocks, dflash, eagle, eagle3, least_squares, medusa, mlp_speculator, p_eagle, induction, parallel):
        for limit, rows in limits.items():
            if hasattr(module, limit):
                monkeypatch.setattr(module, limit, rows)
    drafter, tensors = _of_random_target(drafter)
    drafter.requires_grad_(
        False
    )  # torch's counter of FLOP cannot follow a parameter that is an input without a gradient
    batches = _Counted(_texts(drafter, count=30, tokens=101))
    with FlopCounterMode(display=False, custom_mapping=NO_PRODUCTS) as counter:
        drafter.init_from_target(tensors, batches)
    rows_read = 100 * batches.given
    peak = _peak_bytes(lambda: drafter.init_from_target(tensors, batches))
    cost = drafter.init_cost(drafter.config, rows=30 * 100, answered=30 * 50)
    assert cost.flop == pytest.approx(counter.get_total_flops(), rel=0.2)
    assert cost.memory_bytes == pytest.approx(peak, rel=0.2)
    assert cost.rows_read == pytest.approx(rows_read, rel=0.2)


def test_a_start_takes_two_gram_matrices_however_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store and an EAGLE-3 drafter as for Llama 70B, every width and the rows at once divided by 64. What the drafter reads at all
    rows would be twelve Gram matrices."""
    for module in (induction, least_squares):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 2048 // 64)
    drafter, tensors = _of_random_target(_tiny("eagle3", hidden=128, heads=8, layer_ids=(2, 40, 77, 80))[0])
    hidden, width, sequences = 128, 5 * 128, 256
    about = identity(layer_ids=drafter.config.layer_ids, hidden_size=hidden)
    writer = StoreWriter(tmp_path, about, shard_tokens=2000)
    for number in range(sequences):
        ids, states = torch.randint(0, 80, (33,), dtype=torch.int32), torch.randn(32, 4, hidden)
        writer.append(Sequence(number, False, ids, torch.arange(33) >= 8, states))
    writer.close()
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    unread: Any = None
    data = TrainingData(unread, on_cpu, Store(tmp_path), columns=[0, 1, 2, 3], last_column=3, ttt_steps=1)
    assert sequences * 32 * width > 12 * width**2
    peak = _peak_bytes(lambda: drafter.init_from_target(tensors, data))
    cost = drafter.init_cost(drafter.config, rows=sequences * 32, answered=sequences * 25)
    assert cost.memory_bytes == pytest.approx(peak, rel=0.15)
    assert 4 * 2 * width**2 < peak < 4 * 3 * width**2


def _of_random_target(drafter: Drafter) -> tuple[Drafter, TargetTensors]:
    """A drafter of the same config with memory and rotary frequencies, and the tensors of its target."""
    table = torch.randn(80, drafter.config.hidden_size).bfloat16()
    tensors = TargetTensors(table, table, torch.ones(drafter.config.hidden_size))
    return type(drafter).from_target(drafter.config, tensors, torch.arange(80)), tensors


def _peak_bytes(work: Callable[[], None]) -> int:
    """The most memory that torch allocates at once for it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    held, peak = 0, 0
    for event in profiled.profiler.kineto_results.events():  # in the order of time
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


class _Counted(list[Any]):
    """Count the items that are taken from the list."""

    given = 0

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            self.given += 1
            yield one


def _texts(drafter: Drafter, *, count: int, tokens: int) -> list[Batch]:
    """Texts of random states, each a batch, with the target's last states; the second half of each is answered."""
    made = []
    for number in range(count):
        states = torch.randn(tokens - 1, len(drafter.config.layer_ids), drafter.config.hidden_size)
        ids, answer = torch.randint(0, 80, (tokens,)), torch.arange(tokens) > tokens // 2
        batch = pack([Sequence(number, False, ids, answer, states)], steps=drafter.max_draft_tokens or 1)
        made.append(replace(batch, last_states=states[:, -1]))
    return made


def _recipe(kind: str, **options: Any) -> Recipe:
    return Recipe.model_validate(
        {"name": "x", "target": {"model": "/x"}, "extract": {"prompts": {"path": "x"}},
         "train": {"drafter": {"kind": kind, **options}}, "evaluate": {"k": [1, 2], "acceptance_k": 2}}
    )  # fmt: skip


def _tiny(
    name: str,
    *,
    hidden: int = 32,
    heads: int = 4,
    num_key_value_heads: int = 2,
    layer_ids: tuple[int, ...] = (1, 2, 3),
    **options: Any,
) -> tuple[Drafter, Any]:
    """A drafter of the kind for a tiny target, and three documents whose first halves are prompts."""
    recipe = _recipe(name.split(",")[0].split()[0], **options)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layer_ids[-1],
        num_attention_heads=heads,
        num_key_value_heads=num_key_value_heads,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        vocab_size=80,
        max_position_embeddings=128,
    )
    drafter = drafter_on_meta(recipe, config, layer_ids).to_empty(device="cpu")
    for value in (*drafter.parameters(), *drafter.buffers()):
        value.data.fill_(1) if value.is_floating_point() else value.copy_(torch.arange(len(value)))
    layers = len(drafter.config.layer_ids)
    sequences = [
        Sequence(i, False, torch.randint(0, 80, (20,)), torch.arange(20) >= 10, torch.randn(19, layers, hidden))
        for i in range(3)
    ]
    return drafter.train(), pack(sequences, steps=3)


def test_the_demo_took_about_what_its_plan_says() -> None:
    """Measured (docs/log.md): 119,090 tokens and 920.8 MB of store in 334 s, 334,800 trained in 278 s, evaluated in 305 s
    (with bfloat16 beside float32)."""
    plan = make_plan(load_recipe(RECIPES / "demo.yaml"))["stages"]
    assert plan["extract"]["tokens"] == pytest.approx(119_090, rel=0.01)
    assert 920.8e6 < plan["extract"]["disk_bytes"] < 1.1 * 920.8e6
    assert plan["train"]["tokens"] == pytest.approx(334_800, rel=0.01)
    assert plan["train"]["more"]["optimizer_steps"] == pytest.approx(171, rel=0.05)
    assert plan["train"]["more"]["parameters_trained"] == 5_423_616
    assert plan["convert"]["more"]["parameters"] == 12_501_504
    for stage, seconds in (("extract", 334), ("train", 278), ("evaluate", 305)):
        assert 1 / 1.5 < plan[stage]["hours"] * 3600 / seconds < 1.5, stage


def test_a_plan_says_which_gpus_a_run_takes() -> None:
    path = RECIPES / "llama-3.1-8b-eagle3.yaml"
    stages = make_plan(load_recipe(path))["stages"]
    devices = {name: stage["more"].get("devices") for name, stage in stages.items()}
    assert devices == {
        "extract": "8 engines on GPUs 0 to 7",
        "train": "8 processes on GPUs 0 to 7",
        "convert": None,
        "evaluate": "2 engines at a time on GPU 0",
    }
    plan = make_plan(load_recipe(path, ["plan.hardware.count=1", "plan.hardware.memory_gib=6"]))
    printed = "\n".join(report(plan))
    assert "  8 engines on GPUs 0 to 7, which is MORE than the 1 of `plan.hardware`\n" in printed
    assert "  1 process on GPU 0\n" in printed
    assert re.search(
        r"  initialization, on one process: \S+ FLOP; memory \S+ of 6\.0 GiB, which is TOO MUCH\n", printed
    )
    on_cpus = make_plan(load_recipe(RECIPES / "demo.yaml"))["stages"]
    assert not any("devices" in stage["more"] for stage in on_cpus.values())


def test_a_plan_counts_states_in_ordinary_memory() -> None:
    """Those of all engines of a machine: eight, with four layers of 4,096 values in bfloat16. The KV cache has one layer more."""
    recipe = load_recipe(RECIPES / "llama-3.1-8b-eagle3.yaml")
    plan = make_plan(recipe)
    extract = plan["stages"]["extract"]
    assert recipe.plan is not None
    tokens = extract["more"]["sequences_at_once"] * (recipe.plan.prompt_tokens + recipe.plan.response_tokens)
    assert extract["more"]["states_bytes"] == pytest.approx(8 * tokens * 4 * 4096 * 2, abs=1)
    assert extract["memory_bytes"]["KV cache"] == pytest.approx(tokens * 33 * 2 * 8 * 128 * 2, abs=1)
    gib = f"{extract['more']['states_bytes'] / 1024**3:.3f}"
    assert f"  hidden states of unfinished sequences: {gib} GiB of each machine's ordinary memory\n" in "\n".join(
        report(plan)
    )


def planned(name: str, *overrides: str) -> dict[str, Any]:
    return make_plan(load_recipe(RECIPES / f"{name}.yaml", overrides))["stages"]


def test_a_plan_counts_what_each_gpu_of_a_split_target_holds() -> None:
    """Llama 70B: 80 layers of 8 key and value heads."""
    whole = planned("llama-3.3-70b-eagle3")["extract"]
    two_nodes = planned("llama-3.3-70b-eagle3", "engine.tensor_parallel_size=16")["extract"]
    assert two_nodes["memory_bytes"]["target"] == pytest.approx(whole["memory_bytes"]["target"] / 2)
    assert two_nodes["more"]["devices"].startswith("1 engine on GPUs 0 to 15")
    assert two_nodes["seconds"]["prefill"] == pytest.approx(whole["seconds"]["prefill"] / 2)

    def of_a_sequence(stage: dict[str, Any]) -> float:
        return stage["memory_bytes"]["KV cache"] / stage["more"]["sequences_at_once"]

    # A head cannot be halved: sixteen ranks hold one each, as eight do, and four hold two.
    assert of_a_sequence(two_nodes) == pytest.approx(of_a_sequence(whole), rel=1e-6)
    half = planned("llama-3.3-70b-eagle3", "engine.tensor_parallel_size=4")["extract"]
    assert of_a_sequence(half) == pytest.approx(2 * of_a_sequence(whole), rel=1e-6)


def test_a_plan_splits_the_drafter_as_vllm_does() -> None:
    whole, half = (
        planned("llama-3.3-70b-eagle3", f"engine.tensor_parallel_size={size}")["evaluate"]["memory_bytes"]
        for size in (4, 8)
    )
    assert half["drafter"] == pytest.approx(whole["drafter"] / 2)


def test_engines_after_a_stage_s_first_start_sooner_on_cpus() -> None:
    """The demo's evaluation starts engines twice: for the drafter, and for a second baseline."""
    assert planned("demo")["evaluate"]["seconds"]["starting engines"] == 25 + 3
    assert planned("demo", "evaluate.engine_starts=3")["evaluate"]["seconds"]["starting engines"] == 25 + 7 * 3
    alike = planned("demo", "plan.hardware.later_start_seconds=null")
    assert alike["evaluate"]["seconds"]["starting engines"] == 2 * 25
    assert {stage["seconds"].get("starting engines") for stage in planned("demo").values()} == {25, 28, None}


def test_a_plan_checks_engine_options_as_a_run_does() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(UserError, match=r"`engine\.options\.kv_cache_dtpye`.*did you mean `kv_cache_dtype`"):
        planned("demo", "engine.options={kv_cache_dtpye: fp8}")
    with pytest.raises(UserError, match=r"vLLM 0\.32 hands out no hidden states of a/b"):
        _planned_config("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.max_model_len=256"], "`plan.prompt_tokens: 10` and `extract.max_tokens: 256` are together more than `engine.max_"),
        (["extract.mode=prefill", "plan.response_tokens=9000"], "`plan.response_tokens: 9000` are together more than `engine.max_"),
        (["plan.response_tokens=9000"], "`plan.response_tokens: 9000` is more than `extract.max_tokens: 256`, the longest"),
        (["evaluate.suites={}"], "`evaluate.suites` is empty"),
        (["evaluate.suites={mine: {prompts: held_out}}", "extract.held_out_fraction=0"], "The suite `mine` has no prompts."),
        (["engine.tensor_parallel_size=3"], "4 attention heads, which must divide by it: use one of 1, 2, 4"),
    ],
)  # fmt: skip
def test_what_a_run_would_refuse_has_no_plan(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        _planned_config("llama", {}, *overrides)
    assert message in str(refused.value)


QUANTIZED: dict[str, tuple[dict[str, Any], float]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.125),
    "AWQ": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4.25),
    "FP8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
    "MXFP4": ({"quant_method": "mxfp4"}, 4.25),
    "NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
    "W8A8": ({"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8, "group_size": None}}}}, 8),
    "W4 by groups": (
        {"quant_method": "compressed-tensors", "config_groups": {
            "0": {"weights": {"num_bits": 4, "group_size": 32}}, "1": {"weights": {"num_bits": 4, "group_size": 16, "type": "float"}},
        }}, 4.5,
    ),
    "another": ({"quant_method": "new"}, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_target_takes_the_bytes_that_its_config_says(name: str) -> None:
    config, bits = QUANTIZED[name]
    plain = _planned_config("llama", {})
    quantized = _planned_config("llama", {"quantization_config": config})
    layers = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    for stage, part in (("extract", "target"), ("evaluate", "target, in 2 engines")):
        saved = plain[stage]["memory_bytes"][part] - quantized[stage]["memory_bytes"][part]
        assert saved == int(layers * (16 - bits) / 8) * (2 if stage == "evaluate" else 1)
    assert quantized["extract"]["seconds"]["decoding"] < plain["extract"]["seconds"]["decoding"]


def test_vllm_quantizes_a_plain_target_as_it_loads_it() -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    online = _planned_config("llama", {}, "engine.options={quantization: fp8_per_tensor}")
    assert online["extract"]["memory_bytes"] == _planned_config("llama", config)["extract"]["memory_bytes"]


def test_what_a_config_states_of_all_its_models_is_the_language_model_s() -> None:
    stated = {"quant_method": "fp8"}
    whole = AutoConfig.for_model("gemma3", quantization_config=stated)
    assert language_config(whole).quantization_config == stated
    assert not hasattr(language_config(AutoConfig.for_model("gemma3")), "quantization_config")


def _planned_config(kind: str, fields: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """The stages of a plan for a tiny target in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        sizes = {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 128, "tie_word_embeddings": False,
        }  # fmt: skip
        path.write_text(json.dumps({"model_type": kind, **sizes, **fields}))
        recipe = {
            "name": "x", "target": {"model": "a/b"}, "extract": {"prompts": {"path": "x.jsonl"}, "layer_ids": [1, 2]},
            "train": {"drafter": {"kind": "eagle"}}, "evaluate": {"suites": {"questions": {"prompts": {"path": "x.jsonl"}}}},
            "plan": {
                "prompt_tokens": 10, "response_tokens": 20, "conversations": 100, "target_config": {"path": str(path)},
                "hardware": "h100-80gb",
            },
        }  # fmt: skip
        (Path(folder) / "recipe.yaml").write_text(json.dumps(recipe))
        return make_plan(load_recipe(Path(folder) / "recipe.yaml", overrides))["stages"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": -64}, "`hidden_size` is '-64' in the config of the target"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is '0'"),
        ({"intermediate_size": -3}, "transformers cannot count the parameters of a model of the type `llama`: "),
        ({"num_hidden_layers": "two"}, "is not the config.json of a model: "),
    ],
)
def test_a_config_that_makes_no_sense_is_no_traceback(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        _planned_config("llama", fields)
    assert message in str(caught.value)
    assert ".." not in str(caught.value)


def test_a_target_that_is_not_there_or_not_one_is_said(tmp_path: Path) -> None:
    recipe = {
        "name": "x", "target": {"model": "./nope"}, "extract": {"prompts": {"path": "x.jsonl"}},
        "plan": {"prompt_tokens": 10, "response_tokens": 20, "conversations": 9},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    with pytest.raises(UserError, match=f"The target {tmp_path}/nope does not exist"):
        make_plan(load_recipe(path))
    (tmp_path / "nope").mkdir()
    (tmp_path / "nope" / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"nope/config\.json holds a list, but should hold an object"):
        make_plan(load_recipe(path))
    (tmp_path / "model.gguf").write_text("to be downloaded")
    path.write_text(json.dumps(recipe | {"target": {"gguf": {"path": "model.gguf"}}}))
    with pytest.raises(UserError, match=r"model\.gguf is not a GGUF file"):
        make_plan(load_recipe(path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"has not been prepared here yet: run `draftsmith extract` once"):
        make_plan(load_recipe(path))


def test_what_a_plan_needs_to_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {"name": "x", "target": {"model": str(tmp_path)}, "extract": {"prompts": {"path": "x.jsonl"}}}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    with pytest.raises(UserError, match="add `plan: "):
        make_plan(load_recipe(path))
    lengths = ["plan={prompt_tokens: 10, response_tokens: 20}"]
    with pytest.raises(UserError, match=r"plan: \{ target_config: \{ path: config\.json \} \}"):
        make_plan(load_recipe(path, lengths))
    lengths.append(f"plan.target_config={{path: {RECIPES / 'targets' / 'smollm2-135m.json'}}}")
    with pytest.raises(UserError, match=r"set `plan\.conversations`"):
        make_plan(load_recipe(path, lengths))
    lengths.append("plan.conversations=1000")
    planned = load_recipe(path, lengths)
    assert planned.plan is not None
    assert conversation_counts(planned, planned.plan) == (950, 50)
    assert conversation_counts(load_recipe(path, [*lengths, "extract.prompts.limit=100"]), planned.plan) == (95, 5)
    with pytest.raises(UserError, match=r"`extract\.held_out_fraction: 0\.9` of 3 prompts leaves none to train on"):
        make_plan(load_recipe(path, [*lengths, "extract.prompts.limit=3", "extract.held_out_fraction=0.9"]))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n' * 7)
    for source, rows in (
        ("rows.jsonl", 7),
        ("rows.jsonl, limit: 5", 5),
        ("rows.jsonl, limit: 9", 7),
        ("missing.jsonl", 100),
    ):
        held_out = f"extract.held_out={{path: {tmp_path}/{source}}}"
        assert conversation_counts(load_recipe(path, [*lengths, held_out]), planned.plan) == (1000, rows)
    prompts = f"extract.prompts={{path: {tmp_path}/rows.jsonl}}"
    assert conversation_counts(load_recipe(path, [*lengths, prompts]), planned.plan) == (6, 1)
    with pytest.raises(SystemExit) as done:
        app(["run", str(path), "--plan", *(part for line in lengths for part in ("-s", line))])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert "extract   1,000 conversations, 30 k tokens" in printed
    assert "hours" not in printed
    assert "prompt tokens: 10" in printed
    assert not (tmp_path / "runs").exists()
    lengths.append("extract.prompts.limit=400")
    with pytest.raises(SystemExit):
        app(["run", str(path), "--plan", "--json", *(part for line in lengths for part in ("-s", line))])
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["stages"]["extract"]["more"]["conversations"] == as_json["assumptions"]["conversations"] == 400
