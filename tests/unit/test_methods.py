"""Methods of speculation: valid recipes, and the resulting `speculative_config` of vLLM."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from draftsmith.config.loading import load_recipe
from draftsmith.config.methods import AnyMethod, Method
from draftsmith.config.recipe import Recipe
from draftsmith.engine import speculation
from draftsmith.engine.speculation import check_graph_sizes, method_config, target_arguments, usable_options
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.engine import EngineSpec
from draftsmith.serve.generate import engine_arguments
from draftsmith.serve.vllm_server import server_command
from draftsmith.target.info import TargetInfo, describe_target
from tests.seeing import LLAMA, save_llava_processor
from tests.unit.tiny_run import make_run

METHODS: TypeAdapter[Method] = TypeAdapter(AnyMethod)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    directory = tmp_path_factory.mktemp("target")
    make_run(directory)
    return describe_target(directory / "target")


def _config(target: TargetInfo, method: dict[str, Any], drafter: Path = Path("no"), **options: Any) -> Any:
    return method_config(METHODS.validate_python(method), target, own_drafter=drafter, **options)


def test_methods_without_a_model(target: TargetInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _config(target, {"method": "none"}) is None
    assert _config(target, {"method": "ngram", "options": {"draft_sample_method": "greedy"}}) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 5,
        "prompt_lookup_max": 5,
        "draft_sample_method": "greedy",
    }
    monkeypatch.setattr(speculation, "find_spec", lambda name: object())
    assert _config(target, {"method": "suffix", "suffix_decoding_max_tree_depth": 12})["num_speculative_tokens"] == 12
    monkeypatch.setattr(speculation, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        _config(target, {"method": "suffix"})
    with pytest.raises(UserError, match="no layers for multi-token prediction"):
        _config(target, {"method": "mtp"})
    target.config.num_nextn_predict_layers = 1
    try:
        assert _config(target, {"method": "mtp"}) == {"method": "mtp", "num_speculative_tokens": 1}
    finally:
        target.config.num_nextn_predict_layers = 0


def test_schedules(target: TargetInfo) -> None:
    schedule = [[1, 4, 3], [5, 32, 1]]
    found = _config(target, {"method": "ngram", "num_speculative_tokens_per_batch_size": schedule})
    assert found["num_speculative_tokens_per_batch_size"] == schedule
    assert found["num_speculative_tokens"] == 3
    assert _config(target, {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 0]]}) is None
    for wrong in ([[2, 4, 3]], [[1, 4, 3], [4, 8, 1]], [[1, 4, 3], [6, 8, 1]], [[1, 0, 3]], [[1, 4, -1]]):
        with pytest.raises(ValidationError, match="ranges are contiguous"):
            METHODS.validate_python({"method": "ngram", "num_speculative_tokens_per_batch_size": wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "options": {"prompt_lookup_max": 4}},
        {"method": "ngram", "options": {"model": "m"}},
        {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
        {"method": "draft_model"},
        {"method": "lookahead"},
        {"method": "eagle3", "kind": "eagle3"},
    ],
)
def test_invalid_methods(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        METHODS.validate_python(wrong)


def test_draft_models_need_the_target_s_vocabulary(target: TargetInfo, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": target.vocab_size}))
    method = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    assert _config(target, method) == {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    assert "draft_tensor_parallel_size" not in _config(target, method, tensor_parallel_size=2)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": target.vocab_size + 1}))
    with pytest.raises(UserError, match="cannot draft for it"):
        _config(target, method)
    assert _config(target, method | {"options": {"use_heterogeneous_vocab": True}})
    with pytest.raises(UserError, match="no folder"):
        _config(target, method | {"model": "no such thing"})


def _drafter(folder: Path, target: TargetInfo, **changed: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": target.hidden_size, "vocab_size": target.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "draftsmith": {"target": {"name": "its-own-target"}},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def test_drafters_fit_the_target_and_the_method(target: TargetInfo, tmp_path: Path) -> None:
    own = _drafter(tmp_path / "own", target)
    assert _config(target, {"method": "eagle3"}, own) == {
        "method": "eagle3",
        "model": str(own),
        "num_speculative_tokens": 3,
    }
    assert "draft_tensor_parallel_size" not in _config(target, {"method": "eagle3"}, own, tensor_parallel_size=2)
    other = _drafter(tmp_path / "other", target)
    assert _config(target, {"method": "eagle3", "model": str(other), "num_speculative_tokens": 2}, own)["model"] == str(
        other
    )
    with pytest.raises(UserError, match="for the method `eagle3`, but the recipe's method is `medusa`"):
        _config(target, {"method": "medusa"}, own)
    for changed, said in (
        ({"vocab_size": 7}, "a vocabulary of 7"),
        ({"hidden_size": 7}, "a hidden state of 7"),
        ({"target_hidden_size": 7}, "a hidden state of 7"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 99]}}, r"reads the target's layers \[1, 99\]"),
    ):
        with pytest.raises(UserError, match=said + ".* It was made for its-own-target."):
            _config(target, {"method": "eagle3"}, _drafter(tmp_path / "wrong", target, **changed))
    medusa = _drafter(tmp_path / "medusa", target, architectures=["MedusaModel"], num_heads=2)
    with pytest.raises(UserError, match="drafts at most 2 tokens, and 4 were requested"):
        _config(target, {"method": "medusa", "num_speculative_tokens": 4}, medusa)
    assert _config(target, {"method": "medusa"}, medusa)["num_speculative_tokens"] == 2
    (medusa / "old.safetensors").touch()
    with pytest.raises(
        UserError, match=r"other weights beside model.safetensors: old.safetensors. vLLM would load all"
    ):
        _config(target, {"method": "medusa"}, medusa)
    (medusa / "model.safetensors.index.json").write_text('{"weight_map": {}}')  # vLLM goes by it
    assert _config(target, {"method": "medusa"}, medusa)["num_speculative_tokens"] == 2
    marked = {"kind": "p_eagle", "target": {"name": "its-own-target"}}
    p_eagle = _drafter(tmp_path / "p_eagle", target, num_depths=2, mask_token_id=1, draftsmith=marked)
    assert _config(target, {"method": "p_eagle"}, p_eagle) == {
        "method": "eagle3",
        "parallel_drafting": True,
        "model": str(p_eagle),
        "num_speculative_tokens": 2,
    }
    with pytest.raises(UserError, match="for the method `p_eagle`, but the recipe's method is `eagle3`"):
        _config(target, {"method": "eagle3"}, p_eagle)
    # P-EAGLE under the name that vLLM has for it, with which its proposer has as many rows at every load.
    by_load = {
        "method": "eagle3",
        "parallel_drafting": True,
        "num_speculative_tokens_per_batch_size": [[1, 4, 2], [5, 8, 1]],
    }
    with pytest.raises(UserError, match="vLLM's `eagle3` with `parallel_drafting` drafts the same number"):
        _config(target, by_load, p_eagle)
    for drafter in (medusa, p_eagle):
        by_load = {"method": drafter.name, "num_speculative_tokens_per_batch_size": [[1, 4, 2], [5, 8, 0]]}
        with pytest.raises(UserError, match=f"vLLM's `{drafter.name}` drafts the same number of tokens at every load"):
            _config(target, by_load, drafter)


def test_a_drafter_s_heads_are_divided_as_the_target_s(target: TargetInfo, tmp_path: Path) -> None:
    """But for drafters without heads, which are whole on each GPU."""
    own = _drafter(tmp_path / "own", target, num_attention_heads=56, num_key_value_heads=8)
    assert _config(target, {"method": "eagle3"}, own, tensor_parallel_size=8)
    for split in (16, 5):
        with pytest.raises(
            UserError, match=rf"is {split}, .* splits the drafter in .*own as the target: its 56 att.* and 8 key"
        ):
            _config(target, {"method": "eagle3"}, own, tensor_parallel_size=split)
    medusa = _drafter(tmp_path / "medusa", target, architectures=["MedusaModel"], num_heads=2, num_attention_heads=1)
    assert _config(target, {"method": "medusa"}, medusa, tensor_parallel_size=2)["draft_tensor_parallel_size"] == 1


def test_arguments_for_the_target(tmp_path: Path) -> None:
    """Medusa's size of the vocabulary, where vLLM looks for it: at the top of a config that nests its language model's."""
    size, options = (
        save_llava_processor(tmp_path / "nested").text_config.vocab_size,
        {"hf_overrides": {"use_cache": False}},
    )
    LLAMA.config().save_pretrained(tmp_path / "plain")
    for method in ("medusa", "eagle", "eagle3"):
        assert target_arguments(tmp_path / "plain", {"method": method}, options=options) == {}
        expected = {"hf_overrides": {"use_cache": False, "vocab_size": size}} if method == "medusa" else {}
        assert target_arguments(tmp_path / "nested", {"method": method}, options=options) == expected
    assert target_arguments(tmp_path / "nested", None) == {}


@pytest.mark.parametrize(
    ("speculative", "kept"),
    [
        (None, True),
        ({"method": "eagle3"}, True),
        ({"method": "draft_model", "disable_padded_drafter_batch": False}, True),
        ({"method": "ngram"}, False),
        ({"method": "suffix"}, False),
        ({"method": "medusa"}, False),
        ({"method": "eagle3", "disable_padded_drafter_batch": True}, False),
    ],
)
def test_asynchronous_scheduling_is_left_out_where_vllm_refuses_it(
    speculative: dict[str, Any] | None, kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """In measured engines, in generation's and in servers; and that is said once."""
    speculation._say.cache_clear()
    speculative = speculative and {"num_speculative_tokens": 2} | speculative
    options = {"async_scheduling": True, "block_size": 32}
    sections = {"engine": {"options": options}, "serve": {"vllm_args": {"async-scheduling": True}}}
    recipe = Recipe.model_validate({"name": "r", "target": {"model": "a/b"}, **sections})
    spec = EngineSpec(name="e", target="t", dtype="float32", engine=recipe.engine, speculative=speculative)
    target = SimpleNamespace(path=Path("t"), trust_remote_code=False)
    for arguments in (spec.arguments(), engine_arguments(recipe, target, speculative)):  # type: ignore[arg-type]
        assert arguments.get("async_scheduling") == (True if kept else None)
        assert arguments["block_size"] == 32
    command = server_command(recipe, Path("t"), speculative, name="n", host="h", port=1)
    assert ("--async-scheduling" in command) == kept
    said = capsys.readouterr().err
    assert said.count("async_scheduling is left out: vLLM schedules engines with") == (not kept)
    # What is not asked for is no matter.
    assert usable_options({"async_scheduling": False}, speculative) == {"async_scheduling": False}


def test_figures_of_speculation_are_left_out_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Under both spellings, in every engine and server that does not speculate: vLLM starts none with them."""
    speculation._say.cache_clear()
    own = {"per-request-spec-decode-metrics": "summary", "block_size": 32}
    sections = {"engine": {"options": {"per_request_spec_decode_metrics": "summary"}}, "serve": {"vllm_args": own}}
    recipe = Recipe.model_validate({"name": "r", "target": {"model": "a/b"}, **sections})
    target: Any = SimpleNamespace(path=Path("t"), trust_remote_code=False)
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 2}):
        spec = EngineSpec(name="e", target="t", dtype="float32", engine=recipe.engine, speculative=speculative)
        found: list[Any] = [spec.arguments(), engine_arguments(recipe, target, speculative)]
        assert ["per_request_spec_decode_metrics" in arguments for arguments in found] == [speculative is not None] * 2
        command = server_command(recipe, Path("t"), speculative, name="n", host="h", port=1)
        assert ("--per-request-spec-decode-metrics" in command) == (speculative is not None)
        assert "--block-size" in command
    said = capsys.readouterr().err
    for key in ("per_request_spec_decode_metrics", "per-request-spec-decode-metrics"):
        assert said.count(f"{key} is left out: vLLM takes it only where it speculates") == 1


def test_sizes_of_cuda_graphs() -> None:
    full = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    three = {"num_speculative_tokens": 3}
    check_graph_sizes({"cudagraph-capture-sizes": [4, 8], "compilation_config": full}, three)
    check_graph_sizes({}, three)
    check_graph_sizes({"cudagraph_capture_sizes": [6]}, three)  # not full graphs
    for options in (
        {"compilation_config": full | {"cudagraph_capture_sizes": [4, 6]}},
        {"cudagraph-capture-sizes": [4, 6], "compilation-config": full},
    ):
        with pytest.raises(UserError, match="6, not a multiple of 4"):
            check_graph_sizes(options, three)
        check_graph_sizes(options, None)
        # vLLM has graphs for every K of a schedule.
        check_graph_sizes(options, three | {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 1]]})
        check_graph_sizes(options, three | {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 0]]})
        with pytest.raises(UserError, match="has 6, not a multiple of 4 or 5: with 3 or 4 speculative tokens"):
            check_graph_sizes(options, {"num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 8, 3]]} | three)


def test_the_recipe_for_ascend_is_what_vllm_takes() -> None:
    """Its graph sizes are those of its number of tokens, and its methods' keys vLLM's."""
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "ascend-llama-3.1-8b.yaml")
    method = recipe.serve.method
    assert method is not None
    assert method.num_speculative_tokens == 3
    options = recipe.engine.options | recipe.serve.vllm_args
    check_graph_sizes(options, {"num_speculative_tokens": 3})
    two = {"num_speculative_tokens": 2}
    with pytest.raises(UserError, match="not a multiple of 3"):
        check_graph_sizes(options, two)
    check_graph_sizes(recipe.engine.options, two)  # evaluation's engines of other K: vLLM chooses sizes
    assert recipe.engine.options["async_scheduling"] is True
    assert recipe.evaluate.methods["suffix"].keys()["num_speculative_tokens"] == 15
    assert recipe.evaluate.methods["ngram"].keys()["prompt_lookup_max"] == 4


def test_what_the_recipe_for_ascend_has_commented_out_is_a_method(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "recipes" / "ascend-llama-3.1-8b.yaml").read_text()
    path = tmp_path / "ascend.yaml"
    path.write_text(text.replace("    # mtp:", "    mtp:"))
    mtp = load_recipe(path).evaluate.methods["mtp"]
    assert mtp.keys() == {"method": "mtp", "num_speculative_tokens": 2, "disable_padded_drafter_batch": False}
