"""`docs/vllm-examples.md`, row by row: what is typed there means to vLLM what the example means."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.cli.vllm_options import with_speculative_config
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.config.sampling_options import SamplingOptions
from draftsmith.data.conversations import Conversation
from draftsmith.engine import speculation
from draftsmith.engine.speculation import check_graph_sizes, method_config
from draftsmith.extract.job import engine_arguments as extraction_arguments
from draftsmith.run.errors import UserError
from draftsmith.serve import generate
from draftsmith.serve.evaluation.schema import SuiteAcceptance
from draftsmith.serve.server import curl_command
from draftsmith.serve.vllm_server import server_command
from draftsmith.target.info import TargetInfo, describe_target
from tests.unit.test_readme import parsed
from tests.unit.tiny_run import make_run

ROOT = Path(__file__).parents[2]
ARCHITECTURES = {
    "eagle": "EagleLlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3", "medusa": "MedusaModel",
    "mlp_speculator": "EagleMLPSpeculatorModel",
}  # fmt: skip


class Row(NamedTuple):
    vllm: str
    here: str

    @property
    def typed(self) -> list[str]:
        """What the right cell has in backticks."""
        return re.findall(r"`([^`]+)`", self.here)


def rows() -> list[Row]:
    found = []
    for line in (ROOT / "docs" / "vllm-examples.md").read_text().splitlines():
        cells = line.split("|")
        if line.startswith("| `"):
            assert len(cells) == 4, line
            found.append(Row(cells[1].strip(), cells[2].strip()))
    return found


class World(NamedTuple):
    """A target, and drafters for it under any Hub id."""

    folder: Path
    target: TargetInfo
    drafter: Callable[[str], Path]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    make_run(folder)
    target = describe_target(folder / "target")
    target.config.num_nextn_predict_layers = 1

    def drafter(method: str) -> Path:
        config = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_heads": 5, "n_predict": 5}
        path = folder / method
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config | {"architectures": [ARCHITECTURES.get(method, "M")]}))
        return path

    return World(folder, target, drafter)


def recipe_of(row: Row, world: World) -> Recipe:
    """The recipe with everything that the right cell says."""
    recipe: dict[str, Any] = {
        "name": "r",
        "target": {"model": str(world.target.path), "dtype": "float32"},
        "extract": {"prompts": {"path": "prompts.jsonl"}},
    }
    overrides: list[str] = []
    for text in row.typed:
        if text.startswith("-s "):
            overrides.append(shlex.split(text)[1])
        elif text.startswith("draftsmith "):
            params = parsed(shlex.split(text)[1:])
            overrides += with_speculative_config(params.get("overrides"), params.get("speculative_config"))
            overrides += [f"serve.method.method={params['method']}"] if params.get("method") else []
        elif re.match(r"[a-z]+: \{", text):
            for section, keys in yaml.safe_load(text).items():
                if section in Recipe.model_fields:
                    recipe[section] = recipe.get(section, {}) | keys
    path = world.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return load_recipe(path, overrides)


Check = Callable[[Row, World], None]


def speculates(**expected: Any) -> Check:
    """vLLM's `speculative_config`, without the drafter's folder."""

    def check(row: Row, world: World) -> None:
        recipe = recipe_of(row, world)
        method = recipe.serve.method
        assert method is not None
        name = "mtp" if method.method.endswith("_mtp") else method.method
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculation, "find_spec", lambda name: object())
            patch.setattr(speculation, "local_directory", lambda place, revision=None: world.drafter(name))
            found = method_config(method, world.target, own_drafter=world.drafter(name))
        assert found is not None
        assert {key: value for key, value in found.items() if key != "model"} == expected
        command = server_command(recipe, world.target.path, found, name="n", host="h", port=1)
        assert json.loads(command[command.index("--speculative-config") + 1]) == found
        assert generate.engine_arguments(recipe, world.target, found)["speculative_config"] == found

    return check


def serves(*flags: str) -> Check:
    """Flags of vLLM's server, one after another."""

    def check(row: Row, world: World) -> None:
        speculative = {"method": "ngram", "num_speculative_tokens": 2}
        command = server_command(recipe_of(row, world), world.target.path, speculative, name="n", host="h", port=1)
        assert any(tuple(command[at : at + len(flags)]) == flags for at in range(len(command))), command

    return check


def everywhere(**expected: Any) -> Check:
    """Arguments of the engines of generation, extraction and serving."""

    def check(row: Row, world: World) -> None:
        recipe = recipe_of(row, world)
        command = server_command(recipe, world.target.path, None, name="n", host="h", port=1)
        for arguments in (
            generate.engine_arguments(recipe, world.target, None),
            extraction_arguments(recipe, world.target, (1,)),
        ):
            for name, value in expected.items():
                if name != "async_scheduling":  # which extraction sets itself on a CPU
                    assert arguments[name] == value
        for name, value in expected.items():
            flag = f"--{name.replace('_', '-')}"
            assert flag in command
            assert value is True or command[command.index(flag) + 1] == str(value)

    return check


def keys(**expected: Any) -> Check:
    """Keys of the recipe whose effect depends on the machine or the target, as dotted paths with two underscores."""

    def check(row: Row, world: World) -> None:
        dumped: Any = recipe_of(row, world).model_dump()
        for path, value in expected.items():
            found = dumped
            for part in path.split("__"):
                found = found[part]
            assert found == value

    return check


def samples(**expected: Any) -> Check:
    """Arguments of vLLM's `SamplingParams`, in extraction too where the right cell says so."""

    def check(row: Row, world: World) -> None:
        recipe = recipe_of(row, world)
        found = recipe.sampling.parameters() | {"n": recipe.sampling.n, "seed": recipe.sampling.seed}
        assert expected.items() <= found.items()
        if "extract:" in row.here:
            further = recipe.extract.further_sampling() | {"stop": list(recipe.extract.stop)}
            assert expected.items() <= further.items()

    return check


def told(*command: str, **sections: Any) -> Check:
    """What is typed to `draftsmith serve`, or is in a recipe, ends in a message with what the right cell has in backticks."""

    def check(row: Row, world: World) -> None:
        base = {"name": "r", "target": {"model": "a/b"}, "extract": {"prompts": {"path": "p"}}}
        path = world.folder / "told.yaml"
        path.write_text(yaml.safe_dump(base | sections))
        done = CliRunner().invoke(app, ["serve", str(path), *command])
        assert isinstance(done.exception, UserError), done.output
        said = str(done.exception)
        for text in row.typed[:1]:
            assert text in said
        if not row.typed:
            assert "known: " in said

    return check


def same_request(path: str) -> Check:
    """The server is vLLM's own module."""

    def check(row: Row, world: World) -> None:
        source = (ROOT / "serve" / "server_process.py").read_text()
        assert 'run_module("vllm.entrypoints.openai.api_server"' in source
        assert path in curl_command("http://h", "n") or f"localhost:8000{path}" in row.vllm

    return check


def asked_of_a_server(*calls: str) -> Check:
    """What tests/integration/test_server.py asks of a real one."""

    def check(row: Row, world: World) -> None:
        source = (ROOT / "tests" / "integration" / "test_server.py").read_text()
        assert all(call in source for call in calls)

    return check


def answers(row: Row, world: World) -> None:
    """The names of the keys in an answer's line."""
    asked = Conversation(messages=[{"role": "user", "content": "Hello?"}], id="0")
    turn = SimpleNamespace(conversation=asked, token_ids=[1, 2], number=0)
    written = generate._line(
        SimpleNamespace(key="0", turn=turn, sample=0, token_ids=[1, 2], answered=0),
        SimpleNamespace(text="Yes.", token_ids=[3], finish_reason="stop", logprobs=None),
        SimpleNamespace(with_answer=lambda conversation, token_ids, text: conversation),
        SimpleNamespace(sampling=SamplingOptions()),
    )
    assert {"messages", "response"} <= written.keys()
    assert row.typed[:3] == ["messages", "text", "response"]


def compared(row: Row, world: World) -> None:
    assert "identical_to_baseline" in row.typed
    assert "identical_to_baseline" in SuiteAcceptance.__annotations__


def words_of_the_connector(row: Row, world: World) -> None:
    """tests/unit/test_connector.py and tests/integration/test_extract_server.py use them; here, that the page says so."""
    page = (ROOT / "docs" / "extraction-server.md").read_text()
    assert all(word in page for word in ("hidden_states_path", "shared_storage_path"))


def command(name: str, **expected: Any) -> Check:
    """A command with these options."""

    def check(row: Row, world: World) -> None:
        (text,) = [text for text in row.typed if text.startswith(f"draftsmith {name}")]
        params = parsed(shlex.split(text)[1:])
        assert params
        assert expected.items() <= {key: str(value) for key, value in params.items()}.items()
        recipe_of(row, world)

    return check


def graph_sizes(row: Row, world: World) -> None:
    recipe = recipe_of(row, world)
    full = {"compilation_config": {"cudagraph_mode": "FULL"}} | recipe.serve.vllm_args
    check_graph_sizes(full, {"num_speculative_tokens": 4})
    with pytest.raises(UserError, match="not a multiple of 4"):
        check_graph_sizes(full, {"num_speculative_tokens": 3})
    serves("--cudagraph-capture-sizes", "5", "10", "15", "20")(row, world)


def connector(row: Row, world: World) -> None:
    """Covered by tests/unit/test_engine_options.py; here, that extraction's arguments name none of their own yet."""
    assert "kv_transfer_config" not in extraction_arguments(recipe_of(row, world), world.target, (1,))


def without_speculation(row: Row, world: World) -> None:
    recipe = recipe_of(row, world)
    generate.check_sampling(recipe, world.target, None)
    with pytest.raises(UserError, match="takes it only where it does not speculate"):
        generate.check_sampling(recipe, world.target, {"method": "ngram"})


def layers(row: Row, world: World) -> None:
    recipe = recipe_of(row, world)
    assert recipe.extract.layer_ids is not None
    found = extraction_arguments(recipe, world.target, recipe.extract.layer_ids)["speculative_config"]
    assert found["method"] == "extract_hidden_states"
    assert found["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 18, 34]


def both(*checks: Check) -> Check:
    def check(row: Row, world: World) -> None:
        for one in checks:
            one(row, world)

    return check


EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
EXPECTED: list[tuple[str, Check]] = [
    ('"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4', speculates(**NGRAM, prompt_lookup_min=4, prompt_lookup_max=4)),
    ('"method": "ngram", "num_speculative_tokens": 5`', speculates(**NGRAM, prompt_lookup_min=5, prompt_lookup_max=5)),
    ('"prompt_lookup_min": 2', speculates(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=5)),
    ('"model": "[ngram]"', speculates(**NGRAM, prompt_lookup_min=5, prompt_lookup_max=5)),
    ('"method": "suffix"', speculates(
        method="suffix", num_speculative_tokens=15, suffix_decoding_max_tree_depth=24, suffix_decoding_max_cached_requests=10000,
        suffix_decoding_max_spec_factor=1.0, suffix_decoding_min_token_prob=0.1)),
    ('"suffix_decoding_max_cached_requests": 0', keys(serve__method__suffix_decoding_max_cached_requests=0)),
    ('"method": "draft_model", "model"', speculates(method="draft_model", num_speculative_tokens=5)),
    ('"use_heterogeneous_vocab": true', speculates(method="draft_model", num_speculative_tokens=3, use_heterogeneous_vocab=True)),
    ('"method": "draft_model", "parallel_drafting"', speculates(method="draft_model", num_speculative_tokens=3, parallel_drafting=True)),
    ('"method": "eagle", "model"', speculates(method="eagle", num_speculative_tokens=2, draft_tensor_parallel_size=1)),
    ('"method": "eagle3", "model"', speculates(method="eagle3", num_speculative_tokens=2)),
    ('"method": "eagle3", "parallel_drafting": true', speculates(**EAGLE3, parallel_drafting=True)),
    ('"method": "medusa"', speculates(method="medusa", num_speculative_tokens=3)),
    ('"model": "ibm-ai-platform/llama3-70b-accelerator"', speculates(method="eagle", num_speculative_tokens=5)),  # its `n_predict`
    ('"method": "mtp"', speculates(method="mtp", num_speculative_tokens=1)),
    ('"num_speculative_tokens": 2, "method": "deepseek_mtp"', speculates(method="mtp", num_speculative_tokens=2, disable_padded_drafter_batch=False)),
    ('"num_speculative_tokens_per_batch_size"', speculates(
        method="ngram", num_speculative_tokens=5, prompt_lookup_min=5, prompt_lookup_max=5,
        num_speculative_tokens_per_batch_size=[[1, 4, 5], [5, 64, 2]])),
    ('"draft_sample_method"', speculates(**EAGLE3, draft_sample_method="probabilistic")),
    ('"rejection_sample_method"', speculates(**EAGLE3, rejection_sample_method="block")),
    ('"max_model_len": 2048', speculates(**EAGLE3, max_model_len=2048)),
    ('"revision": "main"', both(speculates(**EAGLE3), keys(serve__method__revision="main"))),
    ('"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"` and no', told(serve={"method": {"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}})),
    ('"tensor_parallel_size": 1', told(serve={"method": {"method": "eagle", "tensor_parallel_size": 1}})),
    ('"method": "custom_class"', told(serve={"method": {"method": "custom_class"}})),
    ('"method": "extract_hidden_states"` in', told(serve={"method": {"method": "extract_hidden_states"}})),
    ('LLM(speculative_model="facebook/opt-125m"', told(speculative_model="facebook/opt-125m", num_speculative_tokens=5)),
    ("--speculative_model", told("--speculative_model", "facebook/opt-125m", "--num_speculative_tokens", "5")),
    ('LLM(speculative_model="[ngram]"', told(engine={
        "options": {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4}})),
    ('LLM(speculative_model="ibm-fms', told(serve={"vllm_args": {
        "speculative_model": "ibm-fms/llama3-70b-accelerator", "speculative_draft_tensor_parallel_size": 1}})),
    ('LLM(speculative_model="yuhuili', told(speculative_model="yuhuili/EAGLE-LLaMA3-Instruct-8B")),
    ("--use-v2-block-manager", told("--use-v2-block-manager")),
    ("--spec-method", told("--spec-method", "ngram", "--spec-tokens", "3")),
    ("--speculative-config.method", told("--speculative-config.method", "ngram")),
    ("LLM(speculative_config=", told(speculative_config=NGRAM)),
    ("LLM(model=..., use_v2_block_manager", told(use_v2_block_manager=True)),
    ('LLM(speculative_model="path', told(speculative_model="path/to/modified/eagle/model")),
    ('--speculative-config \'{"num_spec', speculates(method="mtp", num_speculative_tokens=1)),
    ("vllm serve", both(command("serve"), keys(target__model="meta-llama/Llama-3.1-8B-Instruct"))),
    ("vllm serve /path", both(command("serve"), keys(target__model="/path/to/model"))),
    ("python -m", command("serve", host="0.0.0.0", port="8000")),
    ("--speculative-config '", speculates(**NGRAM, prompt_lookup_min=5, prompt_lookup_max=5)),
    ("--api-key", command("serve", api_key="KEY")),
    ("--served-model-name", serves("--served-model-name", "dsv3")),
    ("--max-num-seqs", serves("--max-num-seqs", "10")),
    ("--max-num-batched-tokens", serves("--max-num-batched-tokens", "5000")),
    ("--per-request-spec-decode-metrics", serves("--per-request-spec-decode-metrics", "summary")),
    ("--seed", serves("--seed", "42")),
    ("--data-parallel-size", serves("--data-parallel-size", "1")),
    ("--enable-prefix-caching", serves("--enable-prefix-caching")),
    ("--no-enable-prefix-caching", serves("--no-enable-prefix-caching")),
    ("--compilation-config", serves("--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}')),
    ("cudagraph_capture_sizes", graph_sizes),
    ("tensor_parallel_size=4", everywhere(tensor_parallel_size=4)),
    ("--tensor-parallel-size 16", keys(engine__tensor_parallel_size=16)),
    ("--max-model-len", everywhere(max_model_len=36768)),
    ("--gpu-memory-utilization", keys(engine__gpu_memory_utilization=0.8)),
    ("--gpu_memory_utilization", keys(engine__gpu_memory_utilization=0.8)),
    ("enforce_eager", everywhere(enforce_eager=True)),
    ("--dtype", everywhere(dtype="bfloat16")),
    ("--trust-remote-code", keys(target__trust_remote_code=True)),
    ("--revision", keys(target__revision="main")),
    ("--quantization", everywhere(quantization="fp8")),
    ("--quantization ascend", keys(engine__options={"quantization": "ascend"})),
    ("--enable-expert-parallel", everywhere(enable_expert_parallel=True)),
    ("async_scheduling", everywhere(async_scheduling=True)),
    ("distributed_executor_backend", everywhere(distributed_executor_backend="mp")),
    ("tensor_parallel_size: 4", told(tensor_parallel_size=4)),
    ("async_scheduling: true", told(engine={"async_scheduling": True})),
    ("curl http://localhost:8000/v1/models", same_request("/v1/models")),
    ("client = OpenAI", asked_of_a_server("openai.OpenAI(base_url=", "models.list()")),
    ("curl http://localhost:8000/v1/completions", same_request("/v1/completions")),
    ("client.completions.create", asked_of_a_server('prompt="Hello", max_tokens=4, temperature=0, echo=False, n=1, stream=True')),
    ("client.chat.completions.create", same_request("/v1/chat/completions")),
    ("curl http://localhost:8000/v1/chat/completions", same_request("/v1/chat/completions")),
    ("curl http://localhost:8000/metrics", same_request("/metrics")),
    ("llm.generate", command("generate", prompts="prompts.jsonl", out="answers.jsonl")),
    ("output.prompt", answers),
    ("llm.chat", command("generate", prompts="chats.jsonl", out="answers.jsonl")),
    ("LLM(model=..., speculative_config", speculates(**NGRAM, prompt_lookup_min=5, prompt_lookup_max=5)),
    ("SamplingParams(temperature=0.8", samples(temperature=0.8, top_p=0.95)),
    ("SamplingParams(temperature=0)", samples(temperature=0)),
    ("SamplingParams(top_k=-1", samples(top_k=-1, seed=1, n=2)),
    ("SamplingParams(presence", samples(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)),
    ("SamplingParams(stop", samples(stop=["END"], stop_token_ids=[2])),
    ("SamplingParams(max_tokens=7", samples(max_tokens=7, min_tokens=2)),
    ("SamplingParams(bad_words", samples(bad_words=["never"])),
    ("SamplingParams(ignore_eos", samples(ignore_eos=True, logprobs=3)),
    ("SamplingParams(structured_outputs", samples(structured_outputs={"choice": ["yes", "no"]})),
    ("SamplingParams(min_p", without_speculation),
    ("SamplingParams(best_of", told(sampling={"best_of": 2})),
    ("llm.get_metrics", command("evaluate")),
    ("vllm bench serve --request-rate", keys(evaluate__request_rates=(4.0,))),
    ("vllm bench serve --max-concurrency", keys(evaluate__concurrency=(16,))),
    ("SamplingParams(temperature=0.8", keys(evaluate__temperature=0.8, evaluate__top_p=0.95)),
    ("SamplingParams(temperature=0)` with", both(command("evaluate"), compared)),
    ('"method": "ngram"` and no', both(command("evaluate"), speculates(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=5, prompt_lookup_max=5))),
    ('"method": "extract_hidden_states"', both(command("extract"), layers)),
    ("kv_transfer_config", connector),
    ("SamplingParams(max_tokens=1)", keys(extract__mode="prefill")),
    ("safe_open", command("export", store="runs/NAME/store", to="files")),
    ("output.kv_transfer_params", words_of_the_connector),
]  # fmt: skip


def test_every_row_is_tested() -> None:
    found = [row.vllm.removeprefix("`") for row in rows()]
    assert len(found) == len(EXPECTED) >= 60
    for text, (start, _) in zip(found, EXPECTED, strict=True):
        assert text.startswith(start)


@pytest.mark.parametrize("number", range(len(EXPECTED)), ids=[start.strip("`")[:60] for start, _ in EXPECTED])
def test_row(number: int, world: World) -> None:
    EXPECTED[number][1](rows()[number], world)


@pytest.mark.parametrize(
    "row",
    [row for row in rows() if row.vllm.startswith("`--") and row.here.startswith("`-s ")],
    ids=lambda row: row.vllm,
)
def test_flags_of_vllm_are_translated_as_the_table_says(row: Row, world: World) -> None:
    flag = shlex.split(row.vllm.strip("`"))
    told(*flag)(row, world)
