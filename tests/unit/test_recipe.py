"""Recipes: errors, overrides, paths, presets; and every recipe in recipes/ loads without torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.config.hardware import PRESETS
from draftsmith.config.loading import RENAMED, digest, load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.config.sources import FileSource
from draftsmith.run.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
MINIMAL = {"name": "tiny", "target": {"model": "owner/name"}, "extract": {"prompts": {"path": "prompts.jsonl"}}}


def write(folder: Path, recipe: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def with_key(key: str, value: object, base: dict = MINIMAL) -> dict:
    recipe = yaml.safe_load(yaml.safe_dump(base))
    node = recipe
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[leaf] = value
    return recipe


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_parses_and_carries_its_command(path):
    recipe = load_recipe(path)
    command = "run" if recipe.extract.prompts is not None else "evaluate"  # one that trains nothing
    assert f"draftsmith {command} recipes/{path.name}" in path.read_text().split("\nname:")[0]


def test_recipes_and_errors_need_neither_torch_nor_vllm(tmp_path):
    code = f"""
import sys
from draftsmith.config.loading import load_recipe
from draftsmith.run.errors import UserError

def imported():
    return {{"torch", "vllm", "transformers", "accelerate"}} & set(sys.modules)

for recipe, mistake in (({str(RECIPES / "demo.yaml")!r}, "engine.x=1"), ({str(RECIPES / "demo.yaml")!r}, "train.drafter.kind=x"),
                        ({str(write(tmp_path, MINIMAL))!r}, "engine.x=1")):
    try:
        load_recipe(recipe, [mistake])
    except UserError:
        assert not imported()
    else:
        raise AssertionError(mistake)
load_recipe({str(RECIPES / "demo.yaml")!r})
assert not imported(), imported()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_minimal_recipe_has_defaults(tmp_path):
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert recipe.train.drafter.kind == "eagle3"
    assert recipe.evaluate.k == (1, 2, 3, 4)
    assert recipe.evaluate.suites["held_out"].prompts == "held_out"


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("tarain", "train"),
        ("target.modle", "model"),
        ("train.epoch", "epochs"),
        ("train.drafter.draft_vocab", "draft_vocab_size"),
        ("extract.prompts.limits", "limit"),
        ("extract.held_out.fromat", "format"),
        ("engine.kv_cache_gb", "kv_cache_gib"),
        ("evaluate.suites.mine.max_token", "max_tokens"),
        ("evaluate.suites.mine.prompts.sha", "sha256"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path, key, suggestion):
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, with_key(key, 1)))
    assert f"did you mean `{suggestion}`?" in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("key", ["engine.kv_cache_dtype", "engine.zzz", "zzz"])  # the first is near `kv_cache_gib`
def test_an_unknown_key_of_engines_may_be_vllm_s(tmp_path, key):
    with pytest.raises(UserError, match=r"vLLM's arguments of engines go into `engine\.options`"):
        load_recipe(write(tmp_path, with_key(key, 1)))


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_key_of_an_earlier_version_names_the_new_one(tmp_path, old, new):
    hardware = {
        "device": "x",
        "matmul_tflops": 1,
        "memory_gb_per_second": 1,
        "store_mb_per_second": 1,
        "load_mb_per_second": 1,
    }
    shares = {f"{name}_utilization": 0.5 for name in ("prefill", "decode", "train")}
    minimal = MINIMAL | {"plan": {"prompt_tokens": 1, "response_tokens": 1, "hardware": hardware | shares}}
    with pytest.raises(UserError, match=f"`{re.escape(old)}` is now called `{re.escape(new)}`"):
        load_recipe(write(tmp_path, with_key(old, 1, minimal)))
    with pytest.raises(UserError, match=re.escape(f"`{new}")):  # which is a key: it is the value that is wrong
        load_recipe(write(tmp_path, with_key(new, "no such value", minimal)))


def test_an_unknown_key_with_nothing_near_lists_what_is_known(tmp_path):
    with pytest.raises(UserError, match=r"unknown key `convert\.zzzzzz` \(known keys: dtype, quantize\)"):
        load_recipe(write(tmp_path, with_key("convert.zzzzzz", 1)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", "../elsewhere", "`name`"),
        ("evaluate.k", [], "`evaluate.k`"),
        ("evaluate.k", [0], "`evaluate.k"),
        ("evaluate.k", [2, -1], "`evaluate.k"),
        ("train.epochs", 0, "`train.epochs`"),
        ("train.drafter.kind", "eagle9", "`train.drafter.kind`"),
        ("train.drafter.kind", "madusa", "`train.drafter.kind` is `madusa` (did you mean `medusa`?)"),
        (
            "train.drafter.kind",
            "base",
            "`train.drafter.kind` is `base` (known: dflash, dspark, eagle, eagle3, medusa, mlp_speculator, p_eagle)",
        ),
        ("train.drafter", "eagle3", "`train.drafter`: must be a section"),
        ("train.drafter", {"kind": "medusa", "num_heads": 0}, "`train.drafter.num_heads`"),
        ("train.drafter", {"kind": "medusa", "num_head": 3}, "`train.drafter.num_head` (did you mean `num_heads`?)"),
        ("train.drafter", {"kind": "medusa", "fc_norms": True}, "known keys: bias, draft_vocab_size, kind, num_heads"),
        (
            "train.drafter",
            {"kind": "medusa", "draft_vocab_size": 64},
            "`train.drafter.draft_vocab_size` must be left out here. To replace the whole section: `-s 'train.drafter={kind: ...}'`",
        ),
        ("train.drafter", {"kind": "mlp_speculator", "n_predict": 1}, "`tie_weights` needs an `n_predict` above 1"),
        ("train.drafter", {"kind": "medusa", "num_heads": 3}, "drafts at most 3: set `evaluate.k: [1, 2, 3]`"),
        ("train", {"loss": "kl", "drafter": {"kind": "medusa"}}, "needs `targets: distribution`"),
        (
            "train",
            {"train_lm_head": True, "drafter": {"kind": "eagle"}},
            "`train_lm_head: true` would do nothing: EAGLE drafts with",
        ),
        (
            "train",
            {"ttt_loss_decay": 0.9, "drafter": {"kind": "dflash"}},
            "`ttt_loss_decay` would do nothing: with an `acceptance_alpha`",
        ),
        (
            "train",
            {"ttt_loss_decay": 0.9, "drafter": {"kind": "dspark"}},
            "or set `acceptance_alpha: null` in the drafter's options",
        ),
        ("train.step_costs", {0: 1.1}, "`train.step_costs.0`: Input should be greater"),
        ("sampling.logit_bias", {-1: 3}, "`sampling.logit_bias.-1`: Input"),
        (
            "extract.machines",
            0,
            "`extract.machines`: Input should be greater than or equal to 1 (got 0); `extract.machines`: Input",
        ),
        (
            "evaluate.suites",
            {"a": {"prompts": {"path": "x", "limit": 0}}},
            "recipe: `evaluate.suites.a.prompts.limit`: Input",
        ),
        (
            "evaluate.suites",
            {"a": {"prompts": {}}},
            "`evaluate.suites.a.prompts`: set one of `path`, `package` and `dataset`.",
        ),
        (
            "evaluate.suites",
            {"a": {"prompts": "x"}},
            "`evaluate.suites.a.prompts` must be a section (got 'x'); `evaluate",
        ),
        ("evaluate.suites", {"a[b]": {"turns": 3}}, "`evaluate.suites.a[b].turns`"),
        ("train.epochs", float("inf"), "`train.epochs`: Input should be a finite number"),
        ("train.epochs", 1e300, "`train.epochs`"),
        ("train.lr", float("nan"), "`train.lr`: Input should be a finite number"),
        ("evaluate.request_rates", [float("inf")], "`evaluate.request_rates.0`: Input should be a finite number"),
        ("train.step_costs", {1: float("inf")}, "`train.step_costs.1`: Input should be a finite number"),
        (
            "plan",
            {"prompt_tokens": float("inf"), "response_tokens": 1},
            "`plan.prompt_tokens`: Input should be a finite number",
        ),
        ("extract.repetition_penalty", float("inf"), "`extract.repetition_penalty`: Input should be a finite number"),
        ("evaluate.temperature", 2.1, "`evaluate.temperature`: Input should be less than or equal to 2"),
        ("evaluate.temperature", 0.001, "`evaluate.temperature`: vLLM would sample at 0.01 instead"),
        ("extract.stop", [""], "`extract.stop.0`"),
        ("extract.temperature", 1e-9, "`extract.temperature`: vLLM would sample at 0.01 instead"),
        ("sampling.temperature", 0.005, "`sampling.temperature`: vLLM would sample at 0.01 instead"),
        ("train.ttt_steps", 10**11, "`train.ttt_steps`"),
        ("train.drafter.num_layers", 10**11, "`train.drafter.num_layers`"),
        ("train.drafter", {"kind": "medusa", "num_heads": 10**9}, "`train.drafter.num_heads`"),
        ("train.drafter", {"kind": "p_eagle", "num_depths": 10**9}, "`train.drafter.num_depths`"),
        ("train.drafter", {"kind": "dflash", "block_size": 10**9}, "`train.drafter.block_size`"),
        ("evaluate.output", "../run/store", "`evaluate.output`"),
        ("evaluate.output", ".", "`evaluate.output`"),
        ("evaluate.output", "", "`evaluate.output`"),
        ("evaluate.output", "store", "`evaluate.output`: the run's `store` holds something else"),
        ("evaluate.output", "checkpoint", "`evaluate.output`: the run's `checkpoint`"),
        ("tune.output", "vllm", "`tune.output`: the run's `vllm`"),
        ("tune.output", "generate", "`tune.output`: the run's `generate`"),
        ("tune.output", "a/b", "`tune.output`"),
        ("tune.output", "eval", "`evaluate.output` and `tune.output` are both `eval`"),
        ("seed", -1, "`seed`"),
        ("seed", 2**32, "`seed`"),
        ("target.gguf", {"path": "x.gguf"}, "set exactly one of"),
        ("extract.prompts", {"path": "a", "package": "b==1"}, "set exactly one of"),
        ("extract.prompts", {}, "set one of `path`, `package` and `dataset`"),
        ("extract.prompts", {"package": "b", "file": "f", "sha256": "0" * 64}, "pin a version"),
        ("extract.prompts", {"package": "--pre==1", "file": "f", "sha256": "0" * 64}, "pin a version"),
        ("extract.prompts", {"package": "b==1", "file": "f"}, "sha256"),
        ("extract.prompts", {"package": "b==1", "file": "f", "sha256": "abc"}, "sha256"),
        ("extract.prompts", {"path": "a", "file": "f"}, "`file` goes with `package`"),
        ("extract.prompts", {"path": "a", "split": "train"}, "`split` goes with `dataset`"),
        ("extract.prompts", {"path": "a", "streaming": False}, "`streaming` goes with `dataset`"),
        ("extract.prompts", {"path": "a", "revision": "main"}, "`revision` goes with `dataset`"),
        ("evaluate.only", ["mt"], "not a suite; suites: held_out"),
        (
            "plan",
            {"prompt_tokens": 1, "response_tokens": 1, "hardware": "h200"},
            "`plan.hardware`: there is no preset `h200`",
        ),
        (
            "plan",
            {"prompt_tokens": 1, "response_tokens": 1, "hardware": {"preset": "h100-80gb", "count": 0}},
            "`plan.hardware.count`",
        ),
        (
            "plan",
            {"prompt_tokens": 1, "response_tokens": 1, "hardware": {"count": 1}},
            "`plan.hardware.device` is missing",
        ),
    ],
)
def test_a_wrong_value_is_named(tmp_path, key, value, message):
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, with_key(key, value)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "train",
    [
        {"train_lm_head": False, "drafter": {"kind": "eagle"}},
        {"ttt_loss_decay": 0.9, "drafter": {"kind": "eagle"}},
        {"train_lm_head": True, "drafter": {"kind": "dflash"}},
        {"ttt_loss_decay": 0.9, "drafter": {"kind": "dflash", "acceptance_alpha": None}},
        *({"drafter": {"kind": kind, "mask_token_id": 0}} for kind in ("p_eagle", "dflash", "dspark")),
    ],
)
def test_options_that_do_something_are_taken(tmp_path, train):
    loaded = load_recipe(write(tmp_path, with_key("train", train))).train
    assert {key: getattr(loaded, key) for key in train if key != "drafter"}.items() <= train.items()


def test_missing_section_missing_file_and_broken_yaml(tmp_path):
    with pytest.raises(UserError, match="`target` is missing"):
        load_recipe(write(tmp_path, {"name": "x", "extract": MINIMAL["extract"]}))
    # One that trains nothing.
    assert load_recipe(write(tmp_path, {"name": "x", "target": {"model": "a/b"}})).extract.prompts is None
    with pytest.raises(UserError, match=r"Did you mean .*recipe\.yaml\?"):
        load_recipe(tmp_path / "recipes.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UserError, match=r"folder\.yaml is a folder"):
        load_recipe(tmp_path / "folder.yaml")
    (tmp_path / "broken.yaml").write_text("name: [")
    with pytest.raises(UserError, match="not valid YAML"):
        load_recipe(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UserError, match="must be a YAML mapping"):
        load_recipe(tmp_path / "list.yaml")


def test_overrides_reach_every_depth_and_are_yaml(tmp_path):
    overrides = ["name=other", "train.epochs=0.5", "train.drafter.draft_vocab_size=null", "evaluate.k=[2, 3]"]
    recipe = load_recipe(write(tmp_path, MINIMAL), overrides)
    assert recipe.name == "other"
    assert recipe.train.epochs == 0.5
    assert recipe.train.drafter.draft_vocab_size is None
    assert recipe.evaluate.k == (2, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs", "is not an override"),
        ("=3", "is not an override"),
        ("train.epochs=[", "not valid YAML"),
        ("name.first=x", "is a single value"),
        ("train.epoch=2", "did you mean `epochs`"),
        ("evaluate.k=3", "`evaluate.k` must be a list, as in `-s 'evaluate.k=[3]'`."),
        ("evaluate.only=held_out", "`evaluate.only` must be a list, as in `-s 'evaluate.only=[held_out]'`."),
        ("serve.method=ngram", "`serve.method` must be a section, as in `{ method: ngram }` (got 'ngram')"),
        ("engine.options=fp8", "`engine.options` must be a section (got 'fp8')"),
        ("name=2024", "`name` must be text (got 2024): put it in quotes, as in `-s 'name=\"...\"'`"),
        ("target.revision=2024-01-01", "`target.revision` must be text (got 2024-01-01): put it in quotes"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path, override, message):
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, MINIMAL), [override])
    assert message in str(caught.value)


def test_paths_are_relative_to_the_recipe_and_hub_ids_are_left_alone(tmp_path):
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert recipe.extract.prompts.path == str(tmp_path.resolve() / "prompts.jsonl")
    assert recipe.target.model == "owner/name"
    stores = load_recipe(
        write(tmp_path, with_key("train.extra_stores", [{"path": "../other/store"}]))
    ).train.extra_stores
    assert stores[0].path == str(tmp_path.resolve().parent / "other" / "store")
    free = {"path": "left/alone", "model": "./this/too"}
    assert load_recipe(write(tmp_path, with_key("serve.vllm_args", free))).serve.vllm_args == free
    local = load_recipe(write(tmp_path, with_key("target.model", "./model")))
    assert local.target.model == str(tmp_path.resolve() / "model")


def test_a_key_beside_a_preset_s_name_is_told_the_section(tmp_path):
    path = write(tmp_path, MINIMAL | {"plan": {"prompt_tokens": 1, "response_tokens": 1, "hardware": "h100-80gb"}})
    with pytest.raises(UserError) as caught:
        load_recipe(path, ["plan.hardware.count=8"])
    (override,) = re.findall("-s '(.*)'", str(caught.value))
    assert override == "plan.hardware={preset: h100-80gb, count: 8}"
    assert load_recipe(path, [override]).plan.hardware.count == 8


def test_hardware_by_the_name_of_a_preset(tmp_path):
    def hardware(value, *overrides):
        plan = {"prompt_tokens": 1, "response_tokens": 1, "hardware": value}
        return load_recipe(write(tmp_path, with_key("plan", plan)), [*overrides]).plan.hardware.model_dump()

    for name, values in PRESETS.items():
        assert hardware(name) == hardware({"preset": name}) == hardware(values)
        changed = hardware({"preset": name, "count": 8}, "plan.hardware.start_seconds=300")
        assert changed == hardware(values | {"count": 8, "start_seconds": 300})


def test_digest_ignores_the_order_of_keys_and_sees_every_value():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.5})


def test_sections_cannot_be_changed():
    recipe = Recipe.model_validate(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        recipe.name = "other"
    assert FileSource(path="x").package is None


def test_a_repeated_key_is_refused(tmp_path):
    """PyYAML would take the last in silence, and with it another section's keys."""
    for text, key in (
        ("name: r\ntrain:\n  epochs: 3\ntarget: {model: a/b}\ntrain:\n  lr: 1.0e-3\n", "train"),
        ("name: r\ntarget: {model: a/b, model: c/d}\n", "model"),
        ("name: r\ntarget: {model: a/b}\nevaluate: {suites: {one: {prompts: {path: a, path: b}}}}\n", "path"),
    ):
        (tmp_path / "twice.yaml").write_text(text)
        with pytest.raises(UserError, match=f"the key `{key}` occurs twice in one section, again in line"):
            load_recipe(tmp_path / "twice.yaml")


def test_an_override_reaches_the_place_that_it_names_alone(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "name: r\ntarget: {model: a/b}\nextract: {prompts: &p {path: a}}\n"
        "evaluate:\n  suites: {all: {prompts: *p}, more: {prompts: {<<: *p, limit: 3}}}\ntrain:\n"
    )
    recipe = load_recipe(tmp_path / "r.yaml", ["extract.prompts.limit=10", "train.epochs=2"])
    assert recipe.extract.prompts.limit == 10
    assert recipe.evaluate.suites["all"].prompts.limit is None
    assert recipe.evaluate.suites["more"].prompts.limit == 3
    assert recipe.train.epochs == 2, "a section without keys takes an override"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 2026-31-01\ntarget: {model: a/b}", "not valid YAML: month must be in"),
        ("name: !!timestamp 3\ntarget: {model: a/b}", "not valid YAML: a value is not of the type that its tag"),
        ("name: !!bool x\ntarget: {model: a/b}", "not valid YAML: a value is not of the type that its tag"),
        ("name: r\ntarget: &t {model: a/b, more: *t}", "an alias is inside of what it repeats"),
        ("name: r\ntarget: {model: ~nosuchuser/x}", "`target.model`: "),
    ],
)
def test_what_yaml_or_the_system_cannot_read_is_said(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert message in str(caught.value)
    with pytest.raises(UserError, match="the value is not valid YAML"):
        load_recipe(write(tmp_path, MINIMAL), ["name=2026-31-01"])
