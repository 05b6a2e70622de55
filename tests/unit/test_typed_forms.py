"""What people know from vLLM and type here: methods by their older names, keys, arguments and options of the server."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config import methods
from draftsmith.config.loading import load_recipe
from draftsmith.config.methods import AnyMethod, Method
from draftsmith.config.older_forms import method_by_name, todays_method
from draftsmith.config.recipe import Recipe
from draftsmith.engine import speculation
from draftsmith.engine.speculation import method_config
from draftsmith.run.errors import UserError
from draftsmith.serve import server, vllm_server
from draftsmith.target.info import TargetInfo, describe_target
from tests.unit.tiny_run import make_run

METHODS: TypeAdapter[Method] = TypeAdapter(AnyMethod)
MINIMAL: dict[str, Any] = {
    "name": "typed",
    "target": {"model": "owner/name"},
    "extract": {"prompts": {"path": "prompts.jsonl"}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    directory = tmp_path_factory.mktemp("target")
    make_run(directory)
    return describe_target(directory / "target")


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    speculation._say.cache_clear()


def config_of(target: TargetInfo, method: dict[str, Any], drafter: Path = Path("no"), **options: Any) -> Any:
    return method_config(METHODS.validate_python(method), target, own_drafter=drafter, **options)


def make_drafter(folder: Path, target: TargetInfo, **changed: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": target.hidden_size, "vocab_size": target.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def write(folder: Path, recipe: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


# ---- names and keys of methods ----


def test_older_names_of_mtp_are_vllm_s() -> None:
    pytest.importorskip("vllm")
    from vllm.config.speculative import MTPModelTypes

    assert set(get_args(methods.MtpMethod)) == set(get_args(MTPModelTypes))


def test_an_older_name_of_mtp_is_taken_and_said(target: TargetInfo, capsys: pytest.CaptureFixture[str]) -> None:
    typed = {"num_speculative_tokens": 2, "method": "deepseek_mtp", "disable_padded_drafter_batch": "False"}
    target.config.num_nextn_predict_layers = 1
    try:
        for _ in range(2):
            assert config_of(target, typed) == {
                "method": "mtp",
                "num_speculative_tokens": 2,
                "disable_padded_drafter_batch": False,
            }
    finally:
        target.config.num_nextn_predict_layers = 0
    assert capsys.readouterr().err == "speculation: method deepseek_mtp -> mtp: vLLM's older name of it\n"


@pytest.mark.parametrize(
    ("given", "limits"),
    [({}, (5, 5)), ({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 3}, (3, 3)),
     ({"prompt_lookup_min": 2, "prompt_lookup_max": 8}, (2, 8)), ({"prompt_lookup_min": 7}, (7, 7))],
)  # fmt: skip
def test_limits_of_n_grams_default_as_in_vllm(
    target: TargetInfo, given: dict[str, int], limits: tuple[int, int]
) -> None:
    found = config_of(target, {"method": "ngram", "num_speculative_tokens": 5, **given})
    assert (found["prompt_lookup_min"], found["prompt_lookup_max"]) == limits


def test_the_drafter_is_split_as_vllm_can(target: TargetInfo, tmp_path: Path) -> None:
    own = make_drafter(tmp_path / "own", target)
    method = {"method": "eagle3", "draft_tensor_parallel_size": 4}
    assert config_of(target, method, own, tensor_parallel_size=4)["draft_tensor_parallel_size"] == 4
    assert "draft_tensor_parallel_size" not in config_of(target, {"method": "eagle3"}, own, tensor_parallel_size=4)
    whole_on_each = method | {"draft_tensor_parallel_size": 1}  # which vLLM does not make of it
    assert config_of(target, whole_on_each, own, tensor_parallel_size=4)["draft_tensor_parallel_size"] == 4
    assert config_of(target, whole_on_each, own)["draft_tensor_parallel_size"] == 1
    with pytest.raises(UserError, match=r"is 4, and vLLM splits the model of `eagle3` over 1 or 2 GPUs"):
        config_of(target, method, own, tensor_parallel_size=2)
    whole = make_drafter(tmp_path / "whole", target)
    smaller = {"method": "draft_model", "model": str(whole), "draft_tensor_parallel_size": 1}
    with pytest.raises(UserError, match=r"over 2 GPUs where `engine\.tensor_parallel_size` is 2"):
        config_of(target, smaller, tensor_parallel_size=2)


def test_parallel_drafting_as_vllm_names_it(
    target: TargetInfo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = make_drafter(tmp_path / "own", target, num_depths=4, mask_token_id=1, draftsmith={"kind": "p_eagle"})
    as_in_vllm = {"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 2}
    expected = {
        "method": "eagle3",
        "parallel_drafting": True,
        "model": str(own),
        "num_speculative_tokens": 2,
    }
    assert config_of(target, as_in_vllm, own) == expected
    assert capsys.readouterr().err == ""
    assert config_of(target, as_in_vllm | {"method": "p_eagle", "parallel_drafting": False}, own) == expected
    assert "parallel_drafting False -> True: the drafter was trained to draft so" in capsys.readouterr().err
    another = make_drafter(tmp_path / "another", target)
    assert config_of(target, as_in_vllm | {"model": str(another)}, own)["parallel_drafting"] is True


def test_what_vllm_cannot_combine_is_refused() -> None:
    for wrong in (
        {"method": "eagle3", "parallel_drafting": True, "disable_padded_drafter_batch": True},
        {"method": "draft_model", "model": "a/b", "disable_padded_drafter_batch": True},
        {"method": "dflash", "disable_padded_drafter_batch": True},
        {"method": "eagle3", "options": {"draft_tensor_parallel_size": 1}},
        {"method": "mtp", "parallel_drafting": True},
        {"method": "llama_mtp"},
    ):
        with pytest.raises(ValidationError):
            METHODS.validate_python(wrong)


def test_a_schedule_s_highest_is_said_where_it_replaces_what_was_typed(
    target: TargetInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    by_load = {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 4]]}
    assert config_of(target, by_load)["num_speculative_tokens"] == 4
    assert capsys.readouterr().err == ""
    assert config_of(target, by_load | {"num_speculative_tokens": 2})["num_speculative_tokens"] == 4
    assert "num_speculative_tokens 2 -> 4: the most that" in capsys.readouterr().err


def test_records_of_methods_without_the_new_keys_are_those_of_before() -> None:
    """Digests of evaluations depend on them."""
    dumped = METHODS.validate_python({"method": "eagle3"}).model_dump(mode="json")
    assert dumped == {
        "method": "eagle3",
        "num_speculative_tokens": None,
        "num_speculative_tokens_per_batch_size": None,
        "options": {},
        "model": None,
        "revision": None,
    }
    recipe = Recipe.model_validate(
        MINIMAL | {"evaluate": {"methods": {"a": {"method": "mtp", "draft_tensor_parallel_size": 1}}}}
    )
    assert recipe.evaluate.model_dump(mode="json")["methods"]["a"]["draft_tensor_parallel_size"] == 1


def test_k_of_the_command_line_is_said_where_it_replaces_the_recipe_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe.model_validate(MINIMAL | {"serve": {"method": {"method": "ngram", "num_speculative_tokens": 5}}})
    assert server.served_method(recipe, tmp_path, 2).num_speculative_tokens == 2
    assert capsys.readouterr().err == "serve: num_speculative_tokens 5 gives way to 2\n"
    by_load = {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 3]]}
    scheduled = Recipe.model_validate(MINIMAL | {"serve": {"method": by_load}})
    assert server.served_method(scheduled, tmp_path, 2).num_speculative_tokens_per_batch_size is None
    assert "num_speculative_tokens_per_batch_size ((1, 8, 3),) gives way to 2" in capsys.readouterr().err
    assert server.served_method(recipe, tmp_path, None).num_speculative_tokens == 5
    assert capsys.readouterr().err == ""


# ---- older forms ----


@pytest.mark.parametrize(
    ("place", "given", "method"),
    [
        ("", {"speculative_model": "facebook/opt-125m", "num_speculative_tokens": 5},
         {"method": "draft_model", "model": "facebook/opt-125m", "num_speculative_tokens": 5}),
        ("serve.vllm_args", {"--speculative_model": "[ngram]", "num-speculative-tokens": 5, "ngram_prompt_lookup_max": 4},
         {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}),
        ("engine.options", {"speculative_model": "ibm-fms/llama3-70b-accelerator", "speculative_draft_tensor_parallel_size": 1},
         {"method": "mlp_speculator", "model": "ibm-fms/llama3-70b-accelerator", "draft_tensor_parallel_size": 1}),
        ("serve", {"speculative_config": {"method": "suffix", "num-speculative-tokens": 15}},
         {"method": "suffix", "num_speculative_tokens": 15}),
        ("serve.vllm_args", {"speculative-config": '{"method": "eagle", "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}'},
         {"method": "eagle", "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}),
    ],
)  # fmt: skip
def test_a_recipe_in_an_older_form_is_told_today_s(
    tmp_path: Path, place: str, given: dict[str, Any], method: dict[str, Any]
) -> None:
    recipe: dict[str, Any] = json.loads(json.dumps(MINIMAL))
    section = recipe
    for part in filter(None, place.split(".")):
        section = section.setdefault(part, {})
    section.update(given)
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, recipe))
    said = str(caught.value)
    assert f"`{place + '.' if place else ''}{next(iter(given))}`" in said
    _, _, printed = said.partition("-s 'serve.method=")
    assert json.loads(printed.partition("'`")[0]) == method
    METHODS.validate_python(method)
    assert "\n" not in said


def test_arguments_that_vllm_dropped_are_to_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`engine\.options\.use_v2_block_manager`: Leave out .* no longer has"):
        load_recipe(write(tmp_path, MINIMAL | {"engine": {"options": {"use_v2_block_manager": True}}}))


def test_a_method_without_a_name_is_told_a_likely_one(tmp_path: Path) -> None:
    for model, name in (("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"), ("facebook/opt-125m", "draft_model")):
        with pytest.raises(
            UserError, match=rf"`serve\.method\.method` is missing; for `{model}` perhaps `method: {name}`"
        ):
            load_recipe(write(tmp_path, MINIMAL | {"serve": {"method": {"model": model}}}))
    with pytest.raises(UserError, match=r"`serve\.method\.method` is missing\."):
        load_recipe(write(tmp_path, MINIMAL | {"serve": {"method": {"num_speculative_tokens": 2}}}))


def test_names_of_published_drafters() -> None:
    assert method_by_name("yuhuili/EAGLE-LLaMA3-Instruct-8B") == "eagle"
    assert method_by_name("ibm-granite/granite-8b-code-instruct-accelerator") == "mlp_speculator"
    assert method_by_name("FasterDecoding/medusa-vicuna-7b-v1.3") == "medusa"
    assert method_by_name("z-lab/Qwen3-8B-DFlash-b16") == "dflash"
    assert method_by_name("deepseek-ai/dspark_qwen3_8b_block7") == "dspark"
    assert method_by_name("amd/GPT-OSS-P-EAGLE") == "p_eagle"
    assert method_by_name("someone/sharp-eagle") == "eagle"
    assert method_by_name("Qwen/Qwen3-0.6B") is None
    assert todays_method({"spec_method": "ngram", "spec_tokens": 3}) == {"method": "ngram", "num_speculative_tokens": 3}


# ---- the server ----


def recipe_with_names(value: Any, key: str = "served_model_name") -> Recipe:
    return Recipe.model_validate(MINIMAL | {"serve": {"vllm_args": {key: value, "max_num_seqs": 4}}})


@pytest.mark.parametrize("key", ["served_model_name", "served-model-name", "--served-model-name"])
def test_served_names(key: str) -> None:
    for value, names in (("dsv3", ["dsv3"]), (["one", "two"], ["one", "two"])):
        recipe = recipe_with_names(value, key)
        assert vllm_server.served_names(recipe) == names
        command = vllm_server.server_command(recipe, Path("/t"), None, name="n", host="127.0.0.1", port=1)
        at = command.index("--served-model-name")
        assert command[at + 1 : at + 1 + len(names)] == names
        assert command.count("--served-model-name") == 1
        assert "n" not in command
        assert command[command.index("--max-num-seqs") + 1] == "4"
    assert vllm_server.served_names(Recipe.model_validate(MINIMAL)) == []


def test_vllm_takes_the_names() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = vllm_server.server_command(
        recipe_with_names(["one", "two"]), Path("/t"), None, name="n", host="127.0.0.1", port=1
    )
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command[4:])
    assert parsed.served_model_name == ["one", "two"]


# ---- the command line ----


def error_of(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert isinstance(done.exception, UserError), (done.output, done.exception)
    return str(done.exception)


def test_vllm_s_options_are_translated(tmp_path: Path) -> None:
    said = error_of(
        "serve",
        "r.yaml",
        "-tp",
        "4",
        "--max-model-len=36768",
        "--served_model_name",
        "dsv3",
        "--trust-remote-code",
        "--enable-expert-parallel",
        "--port",
        "20004",
        "--use-v2-block-manager",
        "--speculative_model",
        "facebook/opt-125m",
        "--num_speculative_tokens",
        "5",
    )
    for typed in (
        "-s engine.tensor_parallel_size=4",
        "-s engine.max_model_len=36768",
        "-s serve.vllm_args.served_model_name=dsv3",
        "-s target.trust_remote_code=true",
        "-s engine.options.enable_expert_parallel=true",
        "leave out --use-v2-block-manager",
        """-s 'serve.method={"method": "draft_model", "model": "facebook/opt-125m", "num_speculative_tokens": 5}'""",
    ):
        assert typed in said
    assert "port" not in said
    assert "-s engine.options.quantization=fp8" in error_of("generate", "r", "p", "--out", "o", "--quantization", "fp8")
    dotted = error_of(
        "serve", "r", "--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "3"
    )
    assert """'serve.method={"method": "ngram", "num_speculative_tokens": 3}'""" in dotted


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("[ngram]", {"method": "ngram", "num_speculative_tokens": 5}),  # a list in YAML
        ("@x: [", {"method": "draft_model", "model": "@x: [", "num_speculative_tokens": 5}),  # no YAML
        ("2024-01-01", {"method": "draft_model", "model": "2024-01-01", "num_speculative_tokens": 5}),  # a date in YAML
    ],
)
def test_a_model_s_name_is_taken_as_typed(model: str, method: dict[str, Any]) -> None:
    said = error_of("serve", "r.yaml", "--speculative-model", model, "--num-speculative-tokens", "5")
    assert f"'serve.method={json.dumps(method)}'" in said


def test_sampling_is_the_recipe_s_in_generate_and_a_request_s_in_serve() -> None:
    said = error_of("generate", "r", "p", "--out", "o", "--temperature", "0.3", "--top-p=0.9", "--max_tokens", "8")
    assert "`-s sampling.temperature=0.3 -s sampling.top_p=0.9 -s sampling.max_tokens=8`" in said
    said = error_of("serve", "r", "--temperature", "0.3")
    assert said.endswith(
        "each request to the server says how it is sampled, as in its field `temperature`; leave it out here."
    )
    said = error_of("serve", "r", "--top-k", "4", "--max-num-seqs", "8")
    assert "`-s serve.vllm_args.max_num_seqs=8`; leave out --top-k, which each request to the server says" in said


def test_a_number_of_tokens_alone_is_k(tmp_path: Path) -> None:
    """No method is known that it could be a key of."""
    assert error_of("serve", "r", "--num-speculative-tokens", "4").endswith("on the command line, type `-k 4`.")
    for section in ({"num_speculative_tokens": 4}, {"vllm_args": {"spec_tokens": 4}}):
        with pytest.raises(
            UserError, match=r"`num_speculative_tokens` in the recipe's `serve\.method`, or `-k`"
        ) as caught:
            load_recipe(write(tmp_path, MINIMAL | {"serve": section}))
        assert "draft_model" not in str(caught.value)


def test_a_slip_is_left_to_the_parser() -> None:
    done = CliRunner().invoke(app, ["serve", "r.yaml", "--prot", "1"])
    assert done.exit_code == 2
    assert "--port" in done.output


def test_speculative_config_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Recipe] = []
    monkeypatch.setattr(server, "serve", lambda recipe, run_dir, **options: served.append(recipe))
    recipe = write(tmp_path, MINIMAL | {"serve": {"method": {"method": "suffix"}}})
    for flag in ("--speculative-config", "--speculative_config"):
        typed = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
        assert CliRunner().invoke(app, ["serve", str(recipe), flag, typed]).exit_code == 0
        assert served[-1].serve.method == METHODS.validate_python(json.loads(typed))
    for model in ("ngram", "[ngram]"):
        typed = json.dumps({"model": model, "num-speculative-tokens": 2})
        assert CliRunner().invoke(app, ["serve", str(recipe), "--speculative-config", typed]).exit_code == 0
        assert served[-1].serve.method == METHODS.validate_python({"method": "ngram", "num_speculative_tokens": 2})
    assert "is not JSON" in error_of("serve", str(recipe), "--speculative-config", "{method: ngram}")
    assert "takes a JSON object" in error_of("serve", str(recipe), "--speculative-config", "[]")
    assert "is missing; for `a/b`" in error_of("serve", str(recipe), "--speculative-config", '{"model": "a/b"}')
