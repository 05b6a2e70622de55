"""Targets with Python code of their own, and of types that vLLM alone knows."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mistral_common
import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.recipe import Recipe, TargetConfig
from draftsmith.data.chat_template import Renderer
from draftsmith.data.conversations import Conversation
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.engine.step_cost import target_sizes
from draftsmith.extract.job import engine_job, store_identity
from draftsmith.extract.requests import requests_of
from draftsmith.run.errors import UserError
from draftsmith.serve import vllm_server
from draftsmith.target import pretrained
from draftsmith.target.info import describe_target
from draftsmith.target.prepare import read_config
from draftsmith.target.pretrained import config_of, model_of, processor_of, tokenizer_of
from draftsmith.target.tensors import load_target_tensors
from tests.families import FAMILIES, change_config
from tests.seeing import save_llava_processor
from tests.unit.test_target import HIDDEN, LAYERS, VOCAB, save_model
from tests.unit.tiny_run import make_run

CODE = {
    "configuration_own.py": """
from pathlib import Path
from transformers import LlamaConfig

(Path({folder!r}) / "ran").touch()

class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "modeling_own.py": """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
""",
    "tokenization_own.py": """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
""",
}
"""A Llama under another name."""


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """transformers copies a target's code to a folder of its own before it runs it: not to the user's."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "transformers_modules").mkdir()
    (folder / "transformers_modules" / "__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
        patch.syspath_prepend(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            patch.delitem(sys.modules, name)  # from the user's folder, by an earlier test
        yield


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The directory of a target that transformers cannot read without its code."""
    folder = tmp_path / f"own_{tmp_path.name}"  # transformers names modules after it
    save_model(folder)
    for name, code in CODE.items():
        (folder / name).write_text(code.replace("{folder!r}", repr(str(folder))))
    edit(
        folder / "config.json",
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    )
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    )
    return folder


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def recipe_for(folder: Path, trust: bool) -> Recipe:
    target = {"model": str(folder), "dtype": "float32", "trust_remote_code": trust}
    (folder / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 2)
    prompts = {"path": str(folder / "prompts.jsonl")}
    return Recipe.model_validate({"name": "r", "target": target, "extract": {"prompts": prompts}})


def test_code_does_not_run_unless_asked_for(own: Path) -> None:
    for read in (
        lambda: describe_target(own),
        lambda: describe_target(own, TargetConfig(model=str(own))),
        lambda: read_config(TargetConfig(model=str(own))),
        lambda: load_target_tensors(own),
        lambda: model_of(own, torch.float32),
        lambda: tokenizer_of(own),
        lambda: [*requests_of(recipe_for(own, False), own, None)],  # type: ignore[arg-type]
    ):
        with pytest.raises(UserError) as caught:
            read()
        said = str(caught.value)
        assert "comes with Python code of its own (configuration_own.py, modeling_own.py, tokenization_own.py)" in said
        assert "set `target.trust_remote_code: true` in the recipe" in said
        assert "\n" not in said
    assert not (own / "ran").exists()


def test_code_runs_where_it_is_trusted(own: Path) -> None:
    recipe = recipe_for(own, True)
    target = describe_target(own, recipe.target)
    assert (own / "ran").exists()
    assert (target.num_hidden_layers, target.hidden_size, target.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    assert type(target.config).__name__ == type(read_config(recipe.target)).__name__ == "OwnConfig"
    assert target.trust_remote_code
    tensors = load_target_tensors(own, trust_remote_code=True)
    model = model_of(own, torch.float32, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert not model.training
    assert torch.equal(tensors.embedding, model.model.embed_tokens.weight)
    tokenizer = tokenizer_of(own, trust_remote_code=True)
    assert type(tokenizer).__name__ == "OwnTokenizer"
    assert tokenizer("a").input_ids == [0]
    assert target_sizes(target.config, trust_remote_code=True).parameters == sum(p.numel() for p in model.parameters())


def test_engines_are_told(own: Path) -> None:
    for trust in (True, False):
        recipe = recipe_for(own, trust)
        target = replace(describe_target(own, recipe_for(own, True).target), trust_remote_code=trust)
        job = engine_job(recipe, target, store_identity(recipe, target, (1,)), 1 << 30)
        assert job.engine_arguments["trust_remote_code"] is trust
        command = vllm_server.server_command(recipe, own, None, name="n", host="127.0.0.1", port=1)
        assert ("--trust-remote-code" in command) == trust


def test_a_conversion_runs_code_where_it_is_trusted(own: Path, tmp_path: Path) -> None:
    """Of a drafter made elsewhere, which does not say what its target determines."""
    drafter, out = tmp_path / "drafter", tmp_path / "out"
    drafter.mkdir()
    shapes = {f"blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN) for head in (0, 1)}
    shapes |= {f"lm_heads.{head}.weight": (VOCAB, HIDDEN) for head in (0, 1)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, drafter / "model.safetensors")
    fields = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 2,
        "num_hidden_layers": 1,
    }  # fmt: skip
    (drafter / "config.json").write_text(json.dumps(fields))
    command = ["convert", str(drafter), "--to", "draftsmith", "--out", str(out), "--target", str(own), "--verify"]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, UserError)
    assert "`--trust-remote-code` for a conversion" in str(refused.exception)
    assert not (own / "ran").exists()
    assert not out.exists()
    done = CliRunner().invoke(app, [*command, "--trust-remote-code"], catch_exceptions=False)
    assert done.exit_code == 0
    assert (own / "ran").exists()
    checkpoint, target = (
        Checkpoint.load(out),
        describe_target(own, TargetConfig(model=str(own), trust_remote_code=True)),
    )
    assert checkpoint.config["rms_norm_eps"] == target.config.rms_norm_eps
    assert (checkpoint.target["name"], checkpoint.target["revision"]) == (own.name, target.revision)


def test_code_is_part_of_what_a_target_is(own: Path) -> None:
    trusted = TargetConfig(model=str(own), trust_remote_code=True)
    before = describe_target(own, trusted)
    with (own / "modeling_own.py").open("a") as file:
        file.write("# changed\n")
    assert describe_target(own, trusted).revision != before.revision


def test_code_that_fails_is_named(own: Path) -> None:
    (own / "configuration_own.py").write_text("raise RuntimeError('too old')\n")
    with pytest.raises(
        UserError, match=r"comes with the target .* failed to read its config \(RuntimeError: too old\)"
    ):
        config_of(own, trust_remote_code=True)


# ---- types that transformers does not know ----


def of_type(folder: Path, kind: str, **fields: Any) -> Path:
    """A target that claims to be of this type."""
    save_model(folder)
    edit(folder / "config.json", model_type=kind, **fields)
    return folder


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("step3_text", {}),
        ("chatglm", {"padded_vocab_size": VOCAB, "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}}),
    ],
)
def test_a_type_that_vllm_alone_knows_is_read_by_vllm(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    """Also if it comes with code, which is then not needed."""
    pytest.importorskip("vllm")
    assert kind not in transformers.CONFIG_MAPPING
    target = describe_target(of_type(tmp_path, kind, **fields))
    assert target.config.model_type == kind
    assert (target.num_hidden_layers, target.hidden_size, target.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    with pytest.raises(UserError, match=f"cannot count the parameters of a model of the type `{kind}`"):
        target_sizes(target.config)


def test_a_type_that_nobody_knows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = of_type(tmp_path / "target", "nobody_s")
    version = transformers.__version__
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=rf"`nobody_s`, which transformers {version} does not know, and vLLM, which may know it"
    ):
        describe_target(folder)
    monkeypatch.undo()
    pytest.importorskip("vllm")
    with pytest.raises(UserError, match="the installed vLLM does not know it either") as caught:
        describe_target(folder)
    assert "\n" not in str(caught.value)


def test_an_unreadable_config_stays_an_error_of_its_own(tmp_path: Path) -> None:
    folder = of_type(tmp_path / "target", "llama")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        describe_target(folder)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"There is no config\.json"):
        describe_target(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"added_tokens": [], "model": 3}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    make_run(tmp_path)
    folder = tmp_path / "target"
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(
        UserError, match=r"Its files \(tokenizer\.json\) are damaged or incomplete: download or save them again"
    ):
        tokenizer_of(folder)


@pytest.mark.parametrize("kind", ["mistral", "mistral3"])
def test_mistral_s_own_tokenizer_file_beside_the_usual_one_is_not_read(tmp_path: Path, kind: str) -> None:
    """transformers would take mistral-common's tokenizer, without a chat template, for tokenizers and for those of processors."""
    save_llava_processor(tmp_path)
    shutil.copy(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json", tmp_path / "tekken.json")
    if kind == "mistral":
        next(family for family in FAMILIES if family.name == "Mistral").save(tmp_path)
        found = tokenizer_of(tmp_path)
    else:
        change_config(tmp_path, model_type="mistral3", vision_config={"model_type": "pixtral"})
        found = processor_of(tmp_path).tokenizer
    assert type(transformers.AutoTokenizer.from_pretrained(tmp_path)).__name__ == "MistralCommonBackend"
    prompt = Renderer(found).prompt(Conversation("1", [{"role": "user", "content": "Hello"}]))
    assert found.decode(prompt).startswith("<user>Hello")
