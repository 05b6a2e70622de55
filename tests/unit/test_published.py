"""Published drafters in a recipe's methods, and EAGLE's `fc.bias`, which vLLM has no place for."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.cli import stages
from draftsmith.cli.published import for_evaluation, for_serving
from draftsmith.config.methods import TrainedDrafter
from draftsmith.config.recipe import Recipe
from draftsmith.convert import convert as convert_module
from draftsmith.convert.convert import convert_checkpoint, recognize
from draftsmith.convert.fc_bias import folded, needs_folding
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.engine import environment
from draftsmith.engine import process as process_module
from draftsmith.engine.speculation import method_config
from draftsmith.run.errors import UserError
from draftsmith.run.weights import in_memory
from draftsmith.serve import tune as tune_module
from draftsmith.serve.evaluation import evaluate as evaluate_module
from draftsmith.serve.speculator import speculator
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.train.packing import pack
from tests.hub_server import Hub, use_hub
from tests.unit.test_eagle import HIDDEN as SMALL
from tests.unit.test_eagle import VOCAB as FEW
from tests.unit.test_eagle import make_drafter, make_sequence, plain_chain
from tests.unit.tiny_run import HIDDEN, LAYERS, VOCAB, make_run

LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 24, "num_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 128, "vocab_size": VOCAB,
}  # fmt: skip
P_EAGLE: dict[str, Any] = LAYER | {
    "layer_ids": [1, 2, 3], "draft_vocab_size": 20, "norm_before_residual": False, "fc_norm": True, "norm_output": False,
    "num_depths": 4, "mask_token_id": 7,
}  # fmt: skip
BLOCK: dict[str, Any] = LAYER | {
    "layer_ids": [1, 2, 3], "draft_vocab_size": 20, "block_size": 5, "mask_token_id": 7, "causal": False,
}  # fmt: skip
ON_LAST: dict[str, Any] = {
    "layer_ids": [LAYERS], "hidden_size": HIDDEN, "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", LAYER | {"layer_ids": [LAYERS], "draft_vocab_size": VOCAB, "noise": 0.0, "fc_bias": True}),
    "specforge": ("eagle3", LAYER | {
        "layer_ids": [1, 2, 3], "draft_vocab_size": 20, "norm_before_residual": False, "fc_norm": False, "norm_output": False}),
    "speculators": ("eagle3", LAYER | {
        "layer_ids": [1, 2, 3], "draft_vocab_size": 20, "norm_before_residual": True, "fc_norm": False, "norm_output": False}),
    "speculators p_eagle": ("p_eagle", P_EAGLE),
    "speculators dspark": ("dspark", BLOCK | {"markov_rank": 3}),
    "medusa": ("medusa", ON_LAST | {"num_heads": 2, "num_layers": 1, "bias": True, "shared_head": False}),
    "ibm": ("mlp_speculator", ON_LAST | {"inner_size": 16, "n_predict": 3, "tie_weights": True, "scale_input": True}),
}  # fmt: skip
"""By format, and the kind where a format has several: the kind, and a config of it."""


def make_checkpoint(kind: str, config: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> Checkpoint:
    generator = torch.Generator().manual_seed(0)
    typed = drafter_class(kind).config_class.from_dict(config)
    shapes = drafter_class(kind).shapes(typed)
    tensors = {name: (torch.randn(shape, generator=generator) / 5).to(dtype) for name, shape in shapes.items()}
    ids = torch.randperm(VOCAB, generator=generator)[: typed.draft_vocab_size].sort().values
    return Checkpoint(kind, typed.to_dict(), dict(UNKNOWN_TARGET), ids, in_memory(tensors)).check()


@pytest.fixture
def target(tmp_path: Path) -> TargetInfo:
    make_run(tmp_path)
    return describe_target(tmp_path / "target")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drafters"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with use_hub(monkeypatch, tmp_path / "hf") as hub:
        yield hub


def publish(folder: Path, name: str) -> Path:
    """A drafter in a published format, as others write it: without Draftsmith's own section."""
    kind, config = PUBLISHED[name]
    folder.mkdir()
    FORMATS[name.split()[0]].write(make_checkpoint(kind, config), folder)
    record = json.loads((folder / "config.json").read_text())
    del record["draftsmith"]
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def recipe_for(target: TargetInfo, model: str, method: str, **options: Any) -> Recipe:
    section = {"method": method, "model": model, **options}
    return Recipe.model_validate({
        "name": "r", "target": {"model": str(target.path), "dtype": "float32"}, "extract": {"prompts": {"path": "p"}},
        "serve": {"method": section}, "evaluate": {"methods": {"theirs": section, "lookup": {"method": "ngram"}}},
    })  # fmt: skip


# ---- formats ----


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_format_is_served(
    name: str, target: TargetInfo, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, _ = PUBLISHED[name]
    recipe = recipe_for(target, str(publish(tmp_path / "theirs", name)), kind)
    found = for_serving(recipe).serve.method
    assert isinstance(found, TrainedDrafter)
    (copy,) = cache.iterdir()
    assert found.model == str(copy)
    assert recognize(copy).format == "vllm"
    said = capsys.readouterr().err
    assert "verified: on the same inputs" in said
    config = method_config(found, target, own_drafter=Path("no"))
    assert config is not None
    assert config["model"] == str(copy)
    again = for_evaluation(recipe).evaluate.methods
    assert again["theirs"] == found
    assert again["lookup"] == recipe.evaluate.methods["lookup"]
    assert capsys.readouterr().err == "", "converted once"
    assert [path.name for path in cache.iterdir()] == [copy.name], "and nothing half-written is left"


@pytest.mark.parametrize("named_in", ["serve", "evaluate", "evaluate beside none"])
def test_without_a_drafter_of_the_runs_own_all_commands_take_the_same_copy(
    named_in: str, target: TargetInfo, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another drafter would be measured than served, and `serve` would not find the schedule that `tune` made for it."""
    written = recipe_for(target, str(publish(tmp_path / "theirs", "eagle")), "eagle").model_dump(mode="json")
    del written["extract"]["prompts"]
    if named_in == "serve":
        written["evaluate"] = {}
    else:
        written["serve"] = {} if named_in == "evaluate" else {"method": {"method": "none"}}
    recipe = Recipe.model_validate(written)
    (tmp_path / "recipe.json").write_text(json.dumps(written))
    given: dict[str, Recipe] = {}

    def tune(recipe: Recipe, run_dir: Path, *, verify: bool) -> None:
        given["tune"] = recipe

    def evaluate(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
        given["evaluate"] = recipe
        return {}

    monkeypatch.setattr(tune_module, "run_tune", tune)
    monkeypatch.setattr(evaluate_module, "run_evaluate", evaluate)
    monkeypatch.setattr(process_module, "prepare_engines", lambda engine: None)
    stages.tune(tmp_path / "recipe.json", runs=tmp_path / "none")
    stages.evaluate_stage(recipe, tmp_path / "none")
    if named_in == "evaluate beside none":
        assert for_serving(recipe) == recipe, "it is served without a drafter"
    else:
        given["serve"] = for_serving(recipe)
    found = {command: speculator(one, tmp_path / "none") for command, one in given.items()}
    (copy,) = cache.iterdir()
    for one in found.values():
        assert isinstance(one.method, TrainedDrafter)
        assert one.method.model == str(copy)
        assert one.sha256 == found["tune"].sha256
        assert one.name == f"eagle ({copy.name})"
    assert copy.name.startswith("theirs-")
    (copy / "stage.json").write_text("of another conversion with the same result")
    assert speculator(given["tune"], tmp_path / "none").sha256 == found["tune"].sha256
    weights = load_file(copy / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, copy / "model.safetensors")
    assert speculator(given["tune"], tmp_path / "none").sha256 != found["tune"].sha256, "another model in the folder"


def test_a_changed_drafter_is_converted_again(target: TargetInfo, tmp_path: Path, cache: Path) -> None:
    folder = publish(tmp_path / "theirs", "eagle")
    recipe = recipe_for(target, str(folder), "eagle")
    first = for_serving(recipe)
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(record | {"rms_norm_eps": 1e-6}))
    assert for_serving(recipe) != first
    assert len(list(cache.iterdir())) == 2


def test_what_vllm_loads_is_left_alone(target: TargetInfo, tmp_path: Path, cache: Path) -> None:
    folder = publish(tmp_path / "theirs", "specforge")
    convert_checkpoint(folder, tmp_path / "vllm", to="vllm")
    ours = recipe_for(target, str(tmp_path / "vllm"), "eagle3")
    assert for_serving(ours) == ours
    shutil.rmtree(folder)
    folder.mkdir()
    unknown = recipe_for(target, str(folder), "eagle3")
    assert for_serving(unknown) == unknown, "serving says what is wrong with it"
    assert not cache.exists()


@pytest.mark.parametrize("masked", [True, False])
def test_a_vocabulary_of_ids_is_converted_to_offsets(
    masked: bool, target: TargetInfo, tmp_path: Path, cache: Path
) -> None:
    """vLLM adds the draft tokens' own numbers to whatever it finds, and would propose other tokens."""
    kind, config = PUBLISHED["specforge"]
    found = make_checkpoint(kind, config)
    folder = tmp_path / "theirs"
    folder.mkdir()
    FORMATS["vllm"].write(found, folder)
    recipe = recipe_for(target, str(folder), kind)
    tensors = load_file(folder / "model.safetensors")
    if not masked:
        del tensors["t2d"]
        save_file(tensors, folder / "model.safetensors")
    assert for_serving(recipe) == recipe
    save_file(tensors | {"d2t": found.draft_token_ids}, folder / "model.safetensors")
    method = for_serving(recipe).serve.method
    assert isinstance(method, TrainedDrafter)
    (copy,) = cache.iterdir()
    assert method.model == str(copy)
    assert torch.equal(load_file(copy / "model.safetensors")["d2t"], tensors["d2t"])


@pytest.mark.parametrize("key", ["eagle_aux_hidden_state_layer_ids", "layer_ids"])
def test_layers_that_one_of_vllm_s_runners_does_not_read_are_written(
    key: str, target: TargetInfo, tmp_path: Path, cache: Path
) -> None:
    """It would take the target's default layers, without an error."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    kind, config = PUBLISHED["specforge"]
    FORMATS["vllm"].write(make_checkpoint(kind, config | {"layer_ids": [1, 2, 3]}), folder)
    record = json.loads((folder / "config.json").read_text())
    recipe = recipe_for(target, str(folder), kind)
    assert for_serving(recipe) == recipe
    del record["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(record | {"eagle_config": {key: [1, 2, 3]}}))
    method = for_serving(recipe).serve.method
    assert isinstance(method, TrainedDrafter)
    assert Path(method.model or "").parent == cache
    written = json.loads((Path(method.model or "") / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    for section in ({key: []}, {}):  # both runners take the default
        (folder / "config.json").write_text(json.dumps(record | {"eagle_config": section}))
        assert for_serving(recipe) == recipe


def test_the_runner_that_serves_p_eagle_reads_more(target: TargetInfo, tmp_path: Path, cache: Path) -> None:
    """vLLM's first alone serves it. One of others need not say how deep it was trained, and could not be converted then."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    FORMATS["vllm"].write(make_checkpoint("p_eagle", P_EAGLE | {"layer_ids": [1, 2, 3]}), folder)
    record = json.loads((folder / "config.json").read_text())
    for key in ("draftsmith", "num_depths", "eagle_aux_hidden_state_layer_ids"):
        del record[key]
    record["ptd_token_id"] = record.pop("mask_token_id")
    recipe = recipe_for(target, str(folder), "p_eagle")
    (folder / "config.json").write_text(
        json.dumps(record | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}})
    )
    assert for_serving(recipe) == recipe
    (folder / "config.json").write_text(json.dumps(record | {"eagle_config": {"layer_ids": [1, 2, 3]}}))
    with pytest.raises(UserError, match=r"does not say how many draft tokens .*num_depths"):
        for_serving(recipe)
    assert list(cache.glob("*")) == []


ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000,
    "max_position_embeddings": 128, "vocab_size": VOCAB, "block_size": 5, "num_target_layers": LAYERS,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 2]},
}  # fmt: skip


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("name", ["zlab", "vllm"])
def test_what_vllm_loads_and_misreads_is_refused(
    name: str, cpu: bool, target: TargetInfo, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason that a conversion gives, of a DFlash drafter that predicts from the anchor's row too: vLLM's first runner would serve
    it, off by one."""
    monkeypatch.setattr(environment, "is_cpu", lambda: cpu)
    made, folder = make_checkpoint("dflash", BLOCK | {"num_layers": 2}), tmp_path / "theirs"
    folder.mkdir()
    if name == "vllm":
        FORMATS["vllm"].write(made, folder)
        record = json.loads((folder / "config.json").read_text())
    else:
        kept = {key: value for key, value in made.tensors.items() if key not in ("mask_embedding", "lm_head.weight")}
        save_file(kept, folder / "model.safetensors")
        record = ZLAB
    (folder / "config.json").write_text(json.dumps(record))
    assert recognize(folder).format == name
    recipe = recipe_for(target, str(folder), "dflash")
    assert for_serving(recipe) == recipe
    record = record | {"dflash_config": record["dflash_config"] | {"sample_from_anchor": True}}
    (folder / "config.json").write_text(json.dumps(record))
    why = r"theirs, read as .* \(dflash\): .*row of the last known token \(`dflash_config.sample_from_anchor: True`\), which is not"
    for refuses in (for_serving, for_evaluation):
        with pytest.raises(UserError, match=why):
            refuses(recipe)
    if name == "zlab":
        with pytest.raises(UserError, match=why):
            convert_checkpoint(folder, tmp_path / "out", to="vllm", target=target)
    assert not cache.exists()


@pytest.mark.parametrize("section", [{"mask_token_id": 7}, {"mask_token_id": 7, "target_layer_ids": None}])
def test_layers_that_are_left_out_are_written(
    section: dict[str, Any], target: TargetInfo, tmp_path: Path, cache: Path
) -> None:
    """vLLM would take EAGLE-3's in their place: without an error where the drafter has three layers."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    tensors = make_checkpoint("dflash", BLOCK | {"layer_ids": [3]}).tensors
    del tensors["mask_embedding"], tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    record = ZLAB | {"num_hidden_layers": 1, "num_target_layers": 4, "dflash_config": section}
    (folder / "config.json").write_text(json.dumps(record))
    recipe = recipe_for(target, str(folder), "dflash")
    method = for_serving(recipe).serve.method
    assert isinstance(method, TrainedDrafter)
    assert Path(method.model or "").parent == cache
    written = json.loads((Path(method.model or "") / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [3]
    del record["num_target_layers"]
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"which of the target's states the drafter reads"):
        for_serving(recipe)
    stated = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}  # vLLM takes these too
    (folder / "config.json").write_text(json.dumps(record | stated))
    assert for_serving(recipe) == recipe


def test_sliding_windows_are_left_to_vllm(target: TargetInfo, tmp_path: Path) -> None:
    """No conversion takes them; vLLM's second runner serves them, and its first says that it does not."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    tensors = make_checkpoint("dflash", BLOCK | {"num_layers": 2}).tensors
    del tensors["mask_embedding"], tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(ZLAB | windows))
    recipe = recipe_for(target, str(folder), "dflash")
    assert for_serving(recipe) == recipe
    with pytest.raises(UserError, match="only layers with full attention"):
        convert_checkpoint(folder, tmp_path / "out", to="vllm", target=target)


def test_a_failed_conversion_leaves_nothing(
    target: TargetInfo, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(target, str(publish(tmp_path / "theirs", "eagle")), "eagle")

    def fails(*arguments: Any, **options: Any) -> Any:
        raise UserError("no")

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "compare", fails)
        with pytest.raises(UserError, match="no"):
            for_serving(recipe)
    assert list(cache.iterdir()) == []
    assert for_serving(recipe) != recipe


def test_another_process_may_be_faster(
    target: TargetInfo, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(target, str(publish(tmp_path / "theirs", "eagle")), "eagle")
    original = convert_module.convert_checkpoint

    def twice(*arguments: Any, **options: Any) -> Any:
        original(*arguments, **options)
        return original(*arguments, **options)

    monkeypatch.setattr(convert_module, "convert_checkpoint", twice)
    assert for_serving(recipe) != recipe


def test_a_hub_id(target: TargetInfo, tmp_path: Path, cache: Path, hub: Hub) -> None:
    folder = publish(tmp_path / "theirs", "eagle")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")  # as its authors publish it
    hub.add("yuhuili/EAGLE-tiny", {path.name: path.read_bytes() for path in folder.iterdir()})
    recipe = recipe_for(target, "yuhuili/EAGLE-tiny", "eagle", revision="main")
    found = for_serving(recipe).serve.method
    assert isinstance(found, TrainedDrafter)
    assert found.revision is None
    assert Path(found.model or "").parent == cache
    assert Path(found.model or "").name.startswith("yuhuili--EAGLE-tiny-")
    assert for_serving(recipe).serve.method == found


# ---- fc.bias ----


def test_a_folded_bias_computes_the_authors_formula() -> None:
    """Every state of a chain of three steps, with biases of q, k and v too; float64, 1e-12."""
    theirs = make_drafter(fc_bias=True, attention_bias=True)
    weights = {name: value.detach() for name, value in theirs.state_dict().items()}
    assert weights["fc.bias"].abs().min() > 0
    checkpoint = Checkpoint(
        "eagle", theirs.config.to_dict(), dict(UNKNOWN_TARGET), torch.arange(FEW), in_memory(weights)
    )
    assert needs_folding(checkpoint)
    found = folded(checkpoint)
    assert not needs_folding(found)
    ours = make_drafter(attention_bias=True, output_bias=True)
    ours.load_state_dict(found.tensors)
    sequence, steps = make_sequence(14, 3, 5), 3
    batch = pack([sequence], steps=steps).with_layers([0], 0)
    rows = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0].tolist()
    for k, step in enumerate(ours.chain(batch, steps=steps)):
        for at, p in enumerate(rows):
            if step.loss_weights[at] > 0:
                expected = plain_chain(weights, theirs, sequence, p, k + 1)[k]
                torch.testing.assert_close(step.normed[at], expected, rtol=1e-12, atol=1e-12)
    without = {name: value for name, value in weights.items() if name != "fc.bias"}
    apart = (
        plain_chain(without, theirs, sequence, rows[0], 1)[0] - plain_chain(weights, theirs, sequence, rows[0], 1)[0]
    )
    assert apart.norm() > 0.1 * SMALL**0.5, "the bias matters"


def test_later_layers_get_biases_of_zero() -> None:
    config = PUBLISHED["eagle"][1] | {"num_layers": 2}
    found = folded(make_checkpoint("eagle", config))
    assert not any(found.tensors[f"layers.1.self_attn.{name}_proj.bias"].any() for name in "qkvo")
    assert all(found.tensors[f"layers.0.self_attn.{name}_proj.bias"].any() for name in "qkvo")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_conversion_verifies_itself(dtype: torch.dtype, tmp_path: Path) -> None:
    kind, config = PUBLISHED["eagle"]
    (tmp_path / "theirs").mkdir()
    FORMATS["eagle"].write(make_checkpoint(kind, config, dtype=dtype), tmp_path / "theirs")
    figures = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", to="vllm", verify=True)
    assert figures["verified"]["relative_difference"] < (1e-5 if dtype == torch.float32 else 2e-2)
    record = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (record["qkv_bias"], record["attention_bias"]) == (True, True)
    assert "fc.bias" not in load_file(tmp_path / "ours" / "model.safetensors")


def test_only_vllm_s_format_has_such_biases(tmp_path: Path) -> None:
    found = folded(make_checkpoint(*PUBLISHED["eagle"]))
    (tmp_path / "vllm").mkdir()
    FORMATS["vllm"].write(found, tmp_path / "vllm")
    with pytest.raises(UserError, match="cannot express `output_bias: True`"):
        convert_checkpoint(tmp_path / "vllm", tmp_path / "back", to="eagle")
    # vLLM's one key for both kinds of biases, as in configs of Llama.
    record = json.loads((tmp_path / "vllm" / "config.json").read_text())
    del record["qkv_bias"]
    (tmp_path / "vllm" / "config.json").write_text(json.dumps(record))
    again = FORMATS["vllm"].read(tmp_path / "vllm", "eagle", target=UNKNOWN_TARGET, known={})
    assert again.config == found.config


def test_vllm_s_layer_has_these_biases() -> None:
    """Read in its source: loading a model is `tests/integration/test_kinds.py`'s."""
    vllm = pytest.importorskip("vllm")
    source = (Path(vllm.__file__).parent / "model_executor" / "models" / "llama.py").read_text()
    assert "bias_o_proj = attention_bias" in source
    assert 'hasattr(config, "qkv_bias")' in source
