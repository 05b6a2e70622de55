"""Tuning with fake engines on a simulated clock: planted figures are found, and the schedule follows from them."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save_file

from draftsmith.config import recipe
from draftsmith.config.drafters import KINDS
from draftsmith.config.evaluation import EvaluateConfig, TuneConfig
from draftsmith.config.methods import AnyMethod
from draftsmith.engine.step_cost import EngineStep, target_sizes
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.serve import server
from draftsmith.serve.evaluation import lineup
from draftsmith.serve.roofline import _drafter, roofline
from draftsmith.serve.schedule import k_at, make_schedule, schedule_of
from draftsmith.serve.speculator import speculator
from draftsmith.serve.tune import Tuned, run_tune
from draftsmith.target.info import describe_target
from tests.unit import fake_engine
from tests.unit.fake_engine import COSTS, Engine, make_recipe_and_run, pretend_gpu, sorted_by_category


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[recipe.Recipe, Path]:
    Engine.started.clear()
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Engine(config) for config in configs]
    )
    return make_recipe_and_run(tmp_path)


def test_planted_figures_are_found(run: tuple[recipe.Recipe, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_tune(*run, verify=True)
    shown = capsys.readouterr().err
    TypeAdapter(Tuned).validate_python(found, strict=True)
    assert found["acceptance_per_position"] == [0.75, 0.5, 0.25]
    assert found["acceptance_length"] == {"0": 1.0, "1": 1.75, "2": 2.25, "3": 2.5}
    for batch, costs in COSTS.items():
        for k, cost in costs.items():
            assert found["step_cost"][str(batch)][str(k)] == pytest.approx(cost)
            assert found["speedup"][str(batch)][str(k)] == pytest.approx(found["acceptance_length"][str(k)] / cost)
            # Wall-clock: whole answers, whose steps accept in the same proportion, but for the first, which gives one token.
            assert found["measured"] is not None
            if k:
                one = found["measured"][str(batch)][str(k)]
                assert one["value"] == pytest.approx(found["speedup"][str(batch)][str(k)], rel=0.1)
                assert one["interval"][0] <= one["value"] <= one["interval"][1]
                # Every step takes 0.05 s and more with drafts; a request has its first token after a step.
                assert (
                    one["baseline"]["seconds_per_token"]
                    == one["baseline"]["first_token_seconds"]
                    == pytest.approx(0.05)
                )
                assert one["speculative"]["first_token_seconds"] == pytest.approx(0.05 * cost)
                rates = one["speculative"]["tokens_per_second"] / one["baseline"]["tokens_per_second"]
                assert rates == pytest.approx(one["value"])
                gained = found["acceptance_length"][str(k)]
                assert one["speculative"]["seconds_per_token"] == pytest.approx(0.05 * cost / gained, rel=0.05)
    assert found["schedule"] == [[1, 4, 2], [5, 32, 0]]  # 1.75 / 1.9 is a loss
    assert found["pays"]
    assert found["schedule_measured"] is not None
    assert found["schedule_measured"]["8"]["value"] == pytest.approx(1 / 1.02)
    assert found["schedule_measured"]["4"]["value"] == pytest.approx(found["measured"]["4"]["2"]["value"])
    assert "wall-clock; baseline to speculative: 50 to 27 ms per token; first token after 0.05 and 0.06 s" in shown
    assert found["noise"] is not None
    assert {n: one["value"] for n, one in found["noise"].items()} == pytest.approx({"1": 1.0, "4": 1.0, "8": 1.0})

    # Once finished, no engine is started again, and serving uses the schedule until the drafter changes.
    count = len(Engine.started)
    assert run_tune(*run, verify=True) == found
    assert len(Engine.started) == count
    loaded, run_dir = run
    method = server.served_method(loaded, run_dir, None)
    assert method.num_speculative_tokens_per_batch_size == ((1, 4, 2), (5, 32, 0))
    assert server.served_method(loaded, run_dir, 3).num_speculative_tokens_per_batch_size is None
    (run_dir / "vllm" / "model.safetensors").write_bytes(b"y")
    assert schedule_of(run_dir, "tune") is None
    assert server.served_method(loaded, run_dir, None).num_speculative_tokens == loaded.evaluate.acceptance_k


def test_no_more_tokens_are_tried_than_the_drafter_drafts(run: tuple[recipe.Recipe, Path]) -> None:
    loaded, run_dir = run
    tune = TuneConfig(concurrency=(1,), tokens=41)
    assert tune.k is None
    config = {"architectures": ["MedusaModel"], "num_heads": 2}
    (run_dir / "vllm" / "config.json").write_text(json.dumps(config))
    found = run_tune(loaded.model_copy(update={"tune": tune}), run_dir)
    assert list(found["step_cost"]["1"]) == ["1", "2"]
    count = len(Engine.started)
    assert run_tune(loaded.model_copy(update={"tune": tune.model_copy(update={"k": (1, 2)})}), run_dir) == found
    assert len(Engine.started) == count, "by default it is tuned as with these numbers"
    # What cannot run leaves what was found.
    with pytest.raises(UserError, match=r"at most 2 tokens, and 3 were requested"):
        run_tune(loaded.model_copy(update={"tune": tune.model_copy(update={"k": (3,)})}), run_dir)
    record = stage.read(run_dir / "tune")
    assert record is not None
    assert record["figures"] == found
    wrong = {
        "name": "r",
        "target": {"model": "a/b"},
        "train": {"drafter": {"kind": "medusa", "num_heads": 2}},
        "tune": {"k": [3]},
    }
    wrong["evaluate"] = {"k": [1], "acceptance_k": 1}
    with pytest.raises(ValidationError, match=r"`tune\.k` asks for 3 speculative tokens"):
        recipe.Recipe.model_validate(wrong)


class Recording(Engine):
    """An engine that keeps its prompts by what is asked of it."""

    asked: dict[str, set[int]] = {}  # noqa: RUF012

    def generate(self, prompts: Any, *, max_tokens: int, **named: Any) -> Any:
        self.asked.setdefault(f"{max_tokens} tokens", set()).update(*prompts)
        return super().generate(prompts, max_tokens=max_tokens, **named)

    def begin_load(self, requests: Any, in_flight: int) -> None:
        prompts = self.asked.setdefault(f"{in_flight} in flight", set())
        prompts.update(*(request.prompt_token_ids for request in requests if request.counted))
        super().begin_load(requests, in_flight)


def test_prompts_are_drawn_by_category_with_the_seed(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that is sorted by category, the last prompts, and the first, are of one."""
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Recording(config) for config in configs]
    )
    loaded, run_dir = run
    suites = {"sorted": {"prompts": sorted_by_category(run_dir.parent)}}
    options = {"k": [2], "concurrency": [1, 4], "tokens": 5, "prompts": 8, "engine_starts": 1}
    changes = {
        "evaluate": EvaluateConfig.model_validate({"suites": suites}),
        "tune": TuneConfig.model_validate(options),
    }
    drawn = []
    for seed in (0, 1):
        Recording.asked.clear()
        run_tune(loaded.model_copy(update=changes | {"seed": seed}), run_dir, verify=True)
        drawn.append(dict(Recording.asked))
    counts = {"24 tokens": 8, "5 tokens": 8, "1 in flight": 10, "4 in flight": 64}  # step costs, acceptance, speeds
    for name, count in counts.items():
        assert drawn[0][name] != drawn[1][name]
        for prompts in (one[name] for one in drawn):
            assert len(prompts) == count
            assert sum(prompt < 36 for prompt in prompts) == count / 2


def test_an_engine_for_every_k_gives_the_ratios_of_one_for_each(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each K has an engine of its own, as has the schedule; on a CPU one drafts as many tokens as it is told."""
    whole = run_tune(*run, verify=True)
    assert [config.name for config in Engine.started] == ["baseline", "drafter", "baseline-again"]
    assert whole["engine"] == {"enforce_eager": True, "tensor_parallel_size": 1, "peak_engines": 2}
    pretend_gpu(monkeypatch, gib=6)
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Engine(config) for config in configs]
    )
    Engine.started.clear()
    found = run_tune(*run, verify=True)
    assert found["engine"] == {"enforce_eager": False, "tensor_parallel_size": 1, "peak_engines": 2}
    assert [config.name for config in Engine.started] == [
        "baseline",
        "k1",
        "k2",
        "k3",
        "idle-drafter",
        "baseline-again",
        "k1",
        "k2",
        "k3",
        "schedule",
    ]
    assert {config.memory_share for config in Engine.started} == {0.5}
    for key in ("step_cost", "schedule", "acceptance_length"):
        assert found[key] == whole[key]  # type: ignore[literal-required]
    for key in ("measured", "schedule_measured"):
        assert json.dumps(found[key], sort_keys=True) == json.dumps(whole[key], sort_keys=True)  # type: ignore[literal-required]


def test_no_engine_start_has_more_answers_to_draft_from_than_another(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suffix decoding drafts from earlier answers, those of step costs and acceptance too. What is timed begins without any."""
    monkeypatch.setattr("draftsmith.engine.speculation.find_spec", lambda name: object())
    loaded, run_dir = run
    shutil.rmtree(run_dir / "vllm")
    method = TypeAdapter(AnyMethod).validate_python({"method": "suffix", "num_speculative_tokens": 2})
    changes = {
        "extract": loaded.extract.model_copy(update={"prompts": None}),
        "serve": loaded.serve.model_copy(update={"method": method}),
        "tune": loaded.tune.model_copy(update={"engine_starts": 2}),
    }
    run_tune(loaded.model_copy(update=changes), run_dir, verify=True)
    started = [config.name for config in Engine.started]
    assert started[:2] == ["baseline", "k2"]
    once = (len(started) - 2) // 2
    assert sorted(started[2:]) == sorted(started[2 : 2 + once] * 2)
    assert {"baseline", "baseline-again", "k2"} <= set(started[2 : 2 + once])


class BlocksAgree(Engine):
    """A drafter whose tokens attend to each other: the first is right in every second step of blocks of one, in three of four of longer ones."""

    def generate(self, *arguments: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if self.config.num_speculative_tokens == 1:
                patch.setattr(fake_engine, "ACCEPTED", [1, 0])
            return super().generate(*arguments, **named)


def test_a_block_s_acceptance_is_measured_at_each_k(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [BlocksAgree(config) for config in configs]
    )
    loaded, run_dir = run
    found = run_tune(loaded, run_dir)
    assert found["acceptance_length"]["1"] == 1.75, "EAGLE-3's first draft token is the same at every K"
    drafter = run_dir / "vllm"
    (drafter / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"], "block_size": 4}))
    torch.save(torch.zeros(4), drafter / "mask_embedding.pt")
    found = run_tune(loaded, run_dir)
    # Answers end before a round of four steps does.
    assert found["acceptance_length"] == pytest.approx({"0": 1.0, "1": 1.5, "2": 2.25, "3": 2.5}, abs=0.03)
    assert found["acceptance_per_position"] == [0.75, 0.5, 0.25]


def test_roofline_is_bytes_or_flop(run: tuple[recipe.Recipe, Path]) -> None:
    """At 1 MB/s and 1 MFLOP/s: whichever takes longer, computed by hand."""
    found = run_tune(*run)
    assert found["measured"] is None
    _loaded, run_dir = run
    about = describe_target(run_dir.parent / "target")
    sizes = target_sizes(about.config)
    context = 1 + 41 / 2  # a prompt of one token, its one word being unknown
    reading = 4 * (sizes.multiplied + context * sizes.kv_values) / 1e6

    def seconds(tokens: int) -> float:
        return max(tokens * (2 * sizes.multiplied + 4 * sizes.attention_width * context) / 1e6, reading)

    layers, head = 16, about.vocab_size * about.hidden_size
    drafting = [max(2 * (rows * layers + head), 4 * (layers + head)) / 1e6 for rows in (3, 1)]
    expected = 2.25 * seconds(1) / (seconds(3) + sum(drafting))
    assert found["roofline"] is not None
    assert found["roofline"]["1"]["2"] == pytest.approx(expected)


def at_rates(loaded: recipe.Recipe, **rates: float) -> recipe.Recipe:
    assert loaded.plan is not None
    hardware = loaded.plan.hardware.model_copy(update=rates)
    return loaded.model_copy(update={"plan": loaded.plan.model_copy(update={"hardware": hardware})})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("eagle", (0.4, 0.8, 1.2)),
        ("eagle3", (0.4, 0.8, 1.2)),
        ("p_eagle", (0.4, 0.4, 0.4)),
        ("dflash", (0.4, 0.4, 0.4)),
        ("dspark", (0.48, 0.56, 0.64)),
        ("mlp_speculator", (0.05, 0.1, 0.15)),
    ],
)
def test_roofline_of_drafting(kind: str, expected: tuple[float, ...], run: tuple[recipe.Recipe, Path]) -> None:
    """100,000 float32 weights at 1 MB/s, and arithmetic that takes no time. In one pass, drafts of every K take as long; but DSpark reads one matrix
    for each draft token, and hardly any of another. Of an MLP speculator with eight steps, a draft token reads one. Of an embedding they read hardly
    any. Without a head in the files, the target's is read."""
    loaded, run_dir = at_rates(run[0], matmul_tflops=1), run[1]
    serving, folder = KINDS[kind].serving, run_dir / "vllm"
    config = {
        "architectures": [serving.architecture],
        "block_size": 8,
        "num_depths": 8,
        "mask_token_id": 1,
        "n_predict": 8,
        "draftsmith": {"kind": kind},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in serving.further_files:
        (folder / name).touch()

    def tuned(sizes: dict[str, int]) -> dict[str, float]:
        save_file({name: torch.zeros(size, 1) for name, size in sizes.items()}, folder / "model.safetensors")
        found = run_tune(loaded, run_dir)
        assert found["roofline"] is not None
        assert list(found["roofline"]["1"]) == ["1", "2", "3"]
        lengths = found["acceptance_length"]
        return {k: lengths[k] / speedup for k, speedup in found["roofline"]["1"].items()}

    sizes, head = {"layers.0.mlp.up_proj.weight": 100_000}, {}
    if serving.shares_embedding:
        about = describe_target(run_dir.parent / "target")
        sizes["embed_tokens.weight"], head["lm_head.weight"] = 50_000, about.vocab_size * about.hidden_size
    if kind == "dspark":
        sizes |= {"markov_head.markov_w1.weight": 50_000, "markov_head.markov_w2.weight": 20_000}
    if kind == "mlp_speculator":
        sizes |= {"speculator.emb.0.weight": 50_000}
    costs, without = tuned(sizes), tuned({"norm.weight": 1})
    assert tuned(sizes | head) == pytest.approx(costs)
    of_target, context = target_sizes(describe_target(run_dir.parent / "target").config), 1 + 41 / 2
    reading = 4 * (of_target.multiplied + context * of_target.kv_values) / 1e6
    drafting = [reading * (costs[k] - without[k]) for k in costs]
    assert drafting == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "reads", "of_layers", "of_head", "of_markov"),
    [
        ("eagle", 3, 4 + 1 + 1, 3, 0),
        ("eagle3", 3, 4 + 1 + 1, 3, 0),
        ("p_eagle", 1, 6, 3, 0),
        ("dflash", 1, 4, 3, 0),
        ("dspark", 1, 4, 3, 3),
        ("medusa", 1, 1, 1, 0),
        ("mlp_speculator", 3 / 8, 3 / 8, 3 / 8, 0),
    ],
)
def test_roofline_of_drafting_under_load(
    kind: str, reads: float, of_layers: float, of_head: float, of_markov: int, run: tuple[recipe.Recipe, Path]
) -> None:
    """At K = 3, with one request, drafting takes as long as its bytes; with 64, as long as multiplying the rows of all 64. A block has K + 1 rows,
    and so has the first pass of a chain: those of the target's step; P-EAGLE has the two later draft tokens' besides. The head has the rows of the
    draft tokens, and DSpark's Markov head too. An MLP speculator's step is one of eight."""
    loaded, run_dir = at_rates(run[0], matmul_tflops=1e-5), run[1]
    loaded = loaded.model_copy(update={"tune": TuneConfig(concurrency=(1, 64), tokens=41)})
    layers, head, markov = 100_000, 50_000, 20_000 if kind == "dspark" else 0
    config = {
        "architectures": [KINDS[kind].serving.architecture], "block_size": 8, "num_depths": 8, "n_predict": 8, "num_heads": 3,
        "draftsmith": {"kind": kind},
    }  # fmt: skip
    (run_dir / "vllm" / "config.json").write_text(json.dumps(config))
    for name in KINDS[kind].serving.further_files:
        (run_dir / "vllm" / name).touch()
    sizes = {"layers.0.mlp.up_proj.weight": layers, "lm_head.weight": head, "markov_head.markov_w2.weight": markov}
    tensors = {name: torch.zeros(size, 1) for name, size in sizes.items() if size}
    tensors["norm.weight"] = torch.zeros(8)
    save_file(tensors, run_dir / "vllm" / "model.safetensors")

    about = describe_target(run_dir.parent / "target")
    prompts: Any = [SimpleNamespace(token_ids=[0])]
    found = roofline(loaded, about, speculator(loaded, run_dir), prompts, {3: 2.0})
    assert found is not None
    assert loaded.plan is not None
    hardware = loaded.plan.hardware
    assert hardware is not None

    def drafting(batch: int) -> float:
        step = EngineStep(target_sizes(about.config), 4, 1, batch, 1 + 41 / 2)
        return 2.0 * step.seconds(hardware) / found[batch][3] - replace(step, tokens=4).seconds(hardware)

    bytes_read = 4 * (reads * (layers + head) + 3 * markov)
    multiplied = of_layers * layers + of_head * head + of_markov * markov
    assert drafting(1) == pytest.approx(bytes_read / 1e6, rel=1e-3)
    assert drafting(64) == pytest.approx(64 * 2 * multiplied / 1e7, rel=1e-3)


def test_a_target_of_unknown_size_is_tuned_all_the_same(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*arguments: object, **named: object) -> None:
        raise UserError("nobody knows")

    monkeypatch.setattr("draftsmith.serve.roofline.target_sizes", unknown)
    assert run_tune(*run)["roofline"] is None
    assert "no roofline: nobody knows" in capsys.readouterr().err


def test_too_few_prompts_are_an_error(run: tuple[recipe.Recipe, Path]) -> None:
    loaded, run_dir = run
    with pytest.raises(UserError, match="has 16 prompts, too few for 17 at once"):
        run_tune(loaded.model_copy(update={"tune": TuneConfig(concurrency=(17,))}), run_dir)
    assert not (run_dir / "tune" / stage.MARKER).exists()
    nothing = EvaluateConfig(suites={})
    with pytest.raises(UserError, match=r"no prompts to tune on: `evaluate\.suites` is empty"):
        run_tune(run[0].model_copy(update={"evaluate": nothing}), run[1])


@given(
    st.dictionaries(
        st.integers(1, 64),
        st.dictionaries(st.integers(1, 8), st.floats(0.2, 3.0), min_size=1).flatmap(
            lambda drafting: st.sampled_from([drafting, drafting | {0: 0.9}, drafting | {0: 1.0}])
        ),
        min_size=1,
    )
)
def test_schedules_are_valid_for_vllm_and_have_the_best_k(speedups: dict[int, dict[int, float]]) -> None:
    schedule = make_schedule(speedups, most=64)
    method: Any = TypeAdapter(AnyMethod).validate_python(
        {"method": "ngram", "num_speculative_tokens_per_batch_size": schedule}
    )  # refuses gaps and overlaps
    assert schedule[-1][1] >= 64
    assert all(one[2] != other[2] for one, other in itertools.pairwise(schedule))
    gains = any(speedup > 1 for of_batch in speedups.values() for speedup in of_batch.values())
    assert gains == any(k for _, _, k in schedule)
    for batch, of_batch in speedups.items():
        k = next(k for first, last, k in method.num_speculative_tokens_per_batch_size if first <= batch <= last)
        if gains:
            assert of_batch.get(k, 1.0) == max(of_batch.get(0, 1.0), *of_batch.values())


def test_an_idle_drafter_can_cost_more_than_short_drafts() -> None:
    assert make_schedule({1: {0: 0.98, 1: 1.2}, 8: {0: 0.94, 1: 0.97}}, most=16) == [[1, 16, 1]]
    assert make_schedule({1: {0: 0.98, 1: 0.99}, 8: {0: 0.94, 1: 0.97}}, most=16) == [[1, 16, 0]]  # without a drafter


def test_k_goes_on_beyond_the_last_range_as_in_vllm() -> None:
    assert [k_at([[1, 4, 3], [5, 128, 1]], n) for n in (1, 4, 5, 128, 256)] == [3, 3, 1, 1, 1]
    assert k_at(None, 1) is None
    try:
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as by_vllm
    except ImportError:
        return
    assert by_vllm([(1, 4, 3), (5, 128, 1)], 256, 3)[256] == 1


def test_verified_figures_are_kept_by_a_plain_rerun(run: tuple[recipe.Recipe, Path]) -> None:
    verified = run_tune(*run, verify=True)
    Engine.started.clear()
    assert run_tune(*run) == verified
    assert not Engine.started


def test_a_tuning_that_fails_leaves_the_earlier_one(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, run_dir = run
    before = run_tune(loaded, run_dir)
    folder = run_dir / "tune"
    (folder / "engine-k3.log").touch()
    kept = {name: (folder / name).read_bytes() for name in ("tune.json", stage.MARKER)}

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    changed = loaded.model_copy(update={"tune": loaded.tune.model_copy(update={"k": (1,)})})
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "generate", dies)
        with pytest.raises(KeyboardInterrupt):
            run_tune(changed, run_dir)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != stage.OWNER} == kept
    assert schedule_of(run_dir, "tune") == before["schedule"] == [[1, 4, 2], [5, 32, 0]]
    assert run_tune(loaded, run_dir) == before
    # Of what was asked for nothing is there; and once it is, it alone counts.
    assert run_tune(changed, run_dir)["schedule"] == [[1, 4, 1], [5, 32, 0]]
    assert schedule_of(run_dir, "tune") == [[1, 4, 1], [5, 32, 0]]
    assert schedule_of(run_dir, "tune", {"config.json": "of another"}) is None


@pytest.mark.parametrize(("kind", "devices"), [("eagle3", 2), ("eagle", 2), ("medusa", 1), ("mlp_speculator", 1)])
def test_roofline_of_a_drafter_on_two_gpus(kind: str, devices: int, run: tuple[recipe.Recipe, Path]) -> None:
    """vLLM splits a drafter's layers as the target's, but neither Medusa's blocks nor an MLP speculator."""
    loaded, run_dir = run
    config = {"architectures": [KINDS[kind].serving.architecture], "draftsmith": {"kind": kind}}
    (run_dir / "vllm" / "config.json").write_text(json.dumps(config))
    split = loaded.model_copy(update={"engine": loaded.engine.model_copy(update={"tensor_parallel_size": 2})})
    about = describe_target(run_dir.parent / "target")
    assert _drafter(split, about, speculator(split, run_dir)).devices == devices
    assert _drafter(loaded, about, speculator(loaded, run_dir)).devices == 1
