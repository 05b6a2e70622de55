"""Facts of families of targets: the teacher that training makes of a target's files computes the target's own logits, and a new
drafter turns its heads as vLLM does. An error planted in a fact is found."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.drafters import KINDS, Eagle3Options, EagleOptions
from draftsmith.config.methods import NoSpeculation, Suffix
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.convert.inspection import inspect
from draftsmith.drafters import decoder, layer_ids_to_read
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.drafters.norm import FinalNorm
from draftsmith.engine.environment import require_full_attention
from draftsmith.engine.speculation import method_config
from draftsmith.extract import extract
from draftsmith.extract.job import engine_job, store_identity
from draftsmith.run.errors import UserError
from draftsmith.store.reader import Store
from draftsmith.target import family
from draftsmith.target.family import target_facts
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.pretrained import language_config
from draftsmith.target.reference_states import states_of
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.loss import BlockLoss, ChainLoss
from draftsmith.train.packing import pack
from draftsmith.train.setup import make_accelerator, set_up
from draftsmith.train.train import run_train
from tests.families import FAMILIES, HIDDEN, LAYERS, VOCAB, TinyFamily
from tests.family_checks import POSITIONS, check_embedding, check_facts, check_rope, check_teacher, shape_of

BY_NAME = {each.name: each for each in FAMILIES}
every_family = pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)


# ---- norm, head and logits ----


@every_family
def test_the_teacher_computes_the_targets_logits(tiny: TinyFamily, tmp_path: Path) -> None:
    check_teacher(tiny.save(tmp_path), tmp_path)


SCALED = [
    *(BY_NAME[name] for name in ("Gemma 2", "Gemma 3", "Granite", "Cohere", "Nemotron", "Llama")),
    TinyFamily("Gemma", "gemma", BY_NAME["Llama"].fields | {"tie_word_embeddings": True, "head_dim": 32}),
    TinyFamily("VaultGemma", "vaultgemma", BY_NAME["Gemma 2"].fields | {"layer_types": ["full_attention"] * LAYERS}),
    TinyFamily("MiniCPM3", "minicpm3", BY_NAME["DeepSeek-V3"].fields | {"dim_model_base": 16, "scale_emb": 3.0}),
]


@pytest.mark.parametrize("tiny", SCALED, ids=lambda tiny: tiny.name)
def test_drafters_read_the_embedding_that_vllm_gives_them(tiny: TinyFamily, tmp_path: Path) -> None:
    """vLLM's transformers backend gives Gemma's with its factor, the root of the hidden size, in it."""
    model = tiny.save(tmp_path)
    check_embedding(model, tmp_path)
    family = describe_target(tmp_path).facts.family
    assert (family.scaled_embedding != "never") == ("emma" in tiny.name)


def test_minicpm3_s_last_state_has_the_factor_of_its_logits(tmp_path: Path) -> None:
    """vLLM divides the state (models/minicpm.py), transformers on the way to the logits."""
    model = SCALED[-1].save(tmp_path)
    check_teacher(model, tmp_path)
    info, tensors = describe_target(tmp_path), load_target_tensors(tmp_path)
    divisor = model.config.logits_scaling
    assert divisor > 1
    last = torch.randn(5, HIDDEN)
    with torch.no_grad():
        expected = model.model.norm(last) / divisor
    torch.testing.assert_close(FinalNorm.of(tensors, info.facts.norm_eps)(last), expected)
    assert torch.equal(tensors.lm_head, model.get_output_embeddings().weight)


def test_facts_that_stand_in_vllm_s_models() -> None:
    """Read from their source: which give drafters their last state before the final norm, and which have no head of their own."""
    models = Path(pytest.importorskip("vllm").__file__).parent / "model_executor" / "models"
    sources = {path.stem: path.read_text() for path in models.glob("*.py")}
    logits = {
        name: re.findall(r"def compute_logits\(.*?(?=\n    def |\n\nclass |\Z)", text, re.S)
        for name, text in sources.items()
    }
    norms_late = {name for name, bodies in logits.items() if any(re.search(r"\bnorm\(", body) for body in bodies)}
    assert norms_late == {"mimo", "step3p5"}
    assert {name for name, one in family.FAMILIES.items() if not one.last_state_is_normed} == norms_late
    modules = {"gemma2": "gemma2", "gemma3n_text": "gemma3n", "cohere": "commandr", "cohere2": "commandr"}
    assert {name for name, one in family.FAMILIES.items() if not one.has_lm_head} == set(modules)
    for module in set(modules.values()):
        assert "self.lm_head" not in sources[module]
    for module in ("gemma", "gemma3", "gemma4", "llama", "qwen3", "granite", "nemotron"):
        assert "self.lm_head" in sources[module]


def test_what_vllm_cannot_serve_is_not_trained(tmp_path: Path) -> None:
    cohere = _target(tmp_path, "Cohere")
    for kind, options in KINDS.items():
        asked = options()
        if kind == "eagle":
            with pytest.raises(UserError, match=r"drafters of the kind `eagle`, which have the target's head.*eagle3"):
                layer_ids_to_read(asked, cohere, tuple(range(LAYERS + 1)), where="the store")
        else:
            layer_ids_to_read(asked, cohere, tuple(range(LAYERS + 1)), where="the store")
        facts = dataclasses.replace(cohere.facts, family=family.FAMILIES["mimo"])
        late: Any = SimpleNamespace(name="of MiMo", facts=facts, config=cohere.config, num_hidden_layers=LAYERS)
        with pytest.raises(UserError, match=r"with no trained drafter: .* before the final norm.*ngram"):
            layer_ids_to_read(asked, late, tuple(range(LAYERS + 1)), where="the store")


@pytest.mark.parametrize("subset", [None, VOCAB // 2])
@pytest.mark.parametrize("loss_class", [ChainLoss, BlockLoss])
def test_the_loss_takes_the_soft_cap(loss_class: type[ChainLoss], subset: int | None, tmp_path: Path) -> None:
    """Where the drafter's distribution is the target's own, the loss has no gradient; nor has it with a subset of the vocabulary."""
    tiny = BY_NAME["Gemma 2"]
    model = tiny.save(tmp_path)
    info, tensors = describe_target(tmp_path), load_target_tensors(tmp_path)
    ids = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(1))
    states = states_of(model, ids[:-1], (LAYERS,))
    for cap, expected in ((tensors.logit_soft_cap, True), (None, False)):
        drafter = _SameLogits(model(ids[None]).logits[0].detach())
        loss = loss_class(
            drafter,
            teacher_norm=FinalNorm.of(tensors, info.facts.norm_eps),
            teacher_head=tensors.lm_head.float(),
            teacher_soft_cap=cap,
            ttt_steps=1,
            ttt_loss_decay=1.0,
            loss="kl",
            loss_vocab_size=subset,
        )
        sequence = _sequence(ids, states)
        output = loss(pack([sequence], steps=1).with_layers([0], 0))
        output.loss.backward()
        assert drafter.logits.grad is not None
        assert (abs(output.loss.item()) < 1e-5) == expected
        assert (drafter.logits.grad.norm() < 1e-5) == expected


class _SameLogits(torch.nn.Module):
    """A stand-in for a drafter, whose chain predicts given logits, of which the loss has a gradient."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.draft_token_ids = torch.nn.Parameter(logits), torch.arange(VOCAB)
        self.config = dataclasses.make_dataclass("Config", [("vocab_size", int)])(VOCAB)

    def chain(self, batch: Any, *, steps: int) -> Any:
        from draftsmith.drafters.base import ChainStep

        rows = batch.loss_weights[:, 0].nonzero()[:, 0]
        yield ChainStep(self.logits[rows + 1], torch.eye(VOCAB), batch.loss_weights[rows, 0])


def test_training_gives_the_loss_the_target_s_soft_cap(tmp_path: Path) -> None:
    target = _target(tmp_path, "Gemma 2")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "one two three"}) + "\n")
    options = {"backend": "transformers", "max_tokens": 4, "held_out_fraction": 0.0}
    for kind, loss_class in (("eagle3", ChainLoss), ("dflash", BlockLoss)):
        recipe = _recipe(tmp_path, options, drafter={"kind": kind})
        extract.run_extract(recipe, tmp_path / "run", training_follows=True)  # the second time it does nothing
        store, accelerator = Store(tmp_path / "run" / "store"), make_accelerator(recipe, tmp_path)
        run = set_up(recipe, accelerator, target, store, None, directory=tmp_path, inputs="")
        assert type(run.loss) is loss_class
        assert run.loss.teacher_soft_cap == target.config.final_logit_softcapping == 2.0


def _sequence(ids: torch.Tensor, states: torch.Tensor) -> Any:
    from draftsmith.store.format import Sequence

    return Sequence(1, False, ids.int(), torch.arange(len(ids)) >= 8, states)


def test_layernorm_targets_start_from_centered_states(tmp_path: Path) -> None:
    """EAGLE-3's start predicts the state that the head reads, up to scale and bias: for LayerNorm, the centered one."""
    from draftsmith.drafters.init.least_squares import unit_rms

    tensors = load_target_tensors(_saved("Cohere", tmp_path))
    assert tensors.centered_norm
    states = torch.randn(50, HIDDEN) + 3
    expected = F.layer_norm(states, (HIDDEN,))
    torch.testing.assert_close(unit_rms(states, centered=True), expected, rtol=1e-4, atol=1e-4)


def _saved(name: str, directory: Path) -> Path:
    BY_NAME[name].save(directory)
    return directory


def test_multi_token_prediction_layers_are_not_the_model(tmp_path: Path) -> None:
    for name in ("GLM-4 MoE", "DeepSeek-V3"):
        model = BY_NAME[name].save(tmp_path / name)
        tensors = load_target_tensors(tmp_path / name)
        assert torch.equal(tensors.embedding, model.get_input_embeddings().weight)
        assert torch.equal(tensors.lm_head, model.get_output_embeddings().weight)


def test_the_language_model_of_a_model_with_images(tmp_path: Path) -> None:
    """Its config is nested, and its tensors have a prefix of their own."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = BY_NAME["Gemma 3"].config()
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text.to_dict(), vision_config=vision))
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    info, tensors = describe_target(tmp_path), load_target_tensors(tmp_path)
    assert (info.hidden_size, info.num_hidden_layers, info.config.model_type) == (HIDDEN, LAYERS, "gemma3_text")
    assert torch.equal(tensors.embedding, model.get_input_embeddings().weight)
    assert tensors.lm_head is tensors.embedding


# ---- RoPE ----


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "half": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "partial linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn of DeepSeek": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "partial yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_vllms(name: str) -> None:
    check_rope(shape_of(ROPES[name]), POSITIONS)


@every_family
def test_a_new_drafters_rope_is_vllms(tiny: TinyFamily) -> None:
    facts = target_facts(language_config(tiny.config()))
    check_rope(shape_of(facts.rope_parameters, facts.head_dim), POSITIONS)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, ROPES["default"] | {"rope_theta": 1e7}),
        ({"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4]}, ROPES["default"] | {"rope_theta": 1e6}),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, ROPES["default"]),
        (ROPES["llama3"], ROPES["llama3"]),
        (ROPES["yarn of DeepSeek"], ROPES["yarn of DeepSeek"]),
        ({}, ROPES["default"]),
    ],
)  # fmt: skip
def test_which_rope_a_drafter_takes(stated: dict[str, Any], expected: dict[str, Any]) -> None:
    config = BY_NAME["Llama"].config()
    config.rope_parameters = dict(stated)
    assert target_facts(config).rope_parameters == expected


def test_rope_of_each_kind_of_layer() -> None:
    """The drafter attends to everything, so it takes that of the layers that do."""
    config = BY_NAME["Gemma 3"].config()
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    config.rope_parameters = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": full}
    assert target_facts(config).rope_parameters == full


# ---- the shape of a new drafter ----


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {"hidden_size": 4096, "intermediate_size": 14336}, 14336),
        ("gpt_oss", {}, 4 * 2880),  # one expert: 2880
        ("minimax_m2", {}, 8 * 1536),  # one expert: half the hidden size
        ("qwen3_moe", {}, 8 * 768),
        ("qwen3_next", {}, 10 * 512 + 512),
        ("qwen3_5_moe_text", {}, 8 * 512 + 512),
        ("deepseek_v3", {}, 8 * 2048 + 2048),
        ("mixtral", {}, 4 * 4096),  # two experts are 7 times the hidden size
        ("hunyuan_v1_moe", {"hidden_size": 64, "intermediate_size": 48, "num_experts": 8, "moe_topk": [2, 4]}, 4 * 48),
        ("gemma4_text", {"hidden_size": 2816, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}, 2 * 2816),
        ("opt", {"ffn_dim": 512}, 512),
    ],
)  # fmt: skip
def test_the_mlp_is_never_one_experts(model_type: str, fields: dict[str, Any], expected: int) -> None:
    facts = target_facts(AutoConfig.for_model(model_type, **fields))
    assert facts.intermediate_size == expected


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("qwen3_5_moe_text", {}, (16, 2, 256)),
        ("glm4_moe", {"head_dim": 128}, (64, 8, 128)),  # 96 heads for a hidden size of 4096
        ("deepseek_v3", {}, (56, 8, 128)),
        ("cohere2", {}, (64, 64, 128)),
        ("nemotron_h", {}, (32, 8, 128)),
        ("gpt_oss", {}, (64, 8, 64)),
    ],
)  # fmt: skip
def test_heads_are_those_that_a_llama_config_takes(
    model_type: str, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    facts = target_facts(AutoConfig.for_model(model_type, **fields))
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == expected


@every_family
def test_every_family_has_a_drafter_that_vllm_can_load(tiny: TinyFamily, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    target = describe_target(tmp_path)
    if not target.facts.family.serves_eagle:
        with pytest.raises(UserError, match="vLLM cannot serve"):
            layer_ids_to_read(Eagle3Options(), target, (2, LAYERS), where="the store")
        ids = (2, LAYERS)
    else:
        ids = layer_ids_to_read(Eagle3Options(), target, (2, LAYERS), where="the store")
    config = Eagle3Drafter.make_config(Eagle3Options(), target, ids, 64)
    assert Eagle3Drafter.shapes(config)["fc.weight"] == (HIDDEN, 2 * HIDDEN)
    read = LlamaConfig.from_dict(json.loads(json.dumps(Eagle3Drafter.vllm_layout.write(config))))
    assert (read.head_dim, read.rms_norm_eps) == (config.head_dim, config.rms_norm_eps)


def test_families_that_are_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read like Llama where transformers' own modules agree; refused with the reason where not."""
    assert "helium" not in family.FAMILIES
    helium = AutoConfig.for_model("helium", **BY_NAME["Qwen3"].fields)
    assert target_facts(helium).family == family.FAMILIES["llama"]
    refused = {
        "olmo": "no `rms_norm_eps`", "nanochat": "final_logit_softcapping", "recurrent_gemma": "logits_soft_cap",
        "bert": "no `rms_norm_eps`",
    }  # fmt: skip
    for model_type, reason in refused.items():
        with pytest.raises(UserError, match=reason):
            target_facts(AutoConfig.for_model(model_type))
    # Gemma's norm shows where its type is not known.
    monkeypatch.delitem(family.FAMILIES, "gemma3_text")
    with pytest.raises(UserError, match="the norm before its head computes something else"):
        target_facts(BY_NAME["Gemma 3"].config())


NOT_ALONE = {
    "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama4_text", "ministral", "mimo", "kimi_k2", "qwen2_vl_text", "qwen2_5_vl_text",
    "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text", "step3p5", "falcon_h1", "nemotron_h",
}  # fmt: skip
"""Families whose norm transformers does not build from a type's default config alone, with the name that others have."""


@pytest.mark.parametrize(
    "name", [name for name, facts in family.FAMILIES.items() if facts.norm == "rms" and name not in NOT_ALONE]
)
def test_the_norm_is_what_transformers_computes(name: str) -> None:
    """Whether it multiplies by the weight or by 1 + weight, against transformers' own module."""
    unlike = family._unlike_llama(AutoConfig.for_model(name))
    assert unlike == (
        "the norm before its head computes something else" if family.FAMILIES[name].norm_plus_one else None
    )


# ---- layer ids ----


def test_layer_ids_mean_what_they_say_in_any_order(tmp_path: Path) -> None:
    check_layer_order(_recipe(tmp_path, {"layer_ids": [LAYERS, 1, 2]}), _target(tmp_path))
    assert Eagle3Options(layer_ids=(29, 2, 16)).layer_ids == (2, 16, 29)


def check_layer_order(recipe: Recipe, target: TargetInfo) -> None:
    """The store names its columns in the order in which vLLM hands states out: ascending, each once."""
    assert recipe.extract.layer_ids is not None
    identity = store_identity(recipe, target, recipe.extract.layer_ids)
    speculative = engine_job(recipe, target, identity, 1 << 30).engine_arguments["speculative_config"]
    asked = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert tuple(sorted({*asked})) == identity.layer_ids


def _recipe(folder: Path, extract_options: dict[str, Any], **train: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "run", "target": {"model": str(folder / "target"), "dtype": "float32"},
        "extract": {"prompts": {"path": str(folder / "prompts.jsonl")}, **extract_options}, "train": train,
        "evaluate": {"k": [1, 2], "acceptance_k": 2, "suites": {}}, "plan": {"prompt_tokens": 10, "response_tokens": 10, "conversations": 10},
    })  # fmt: skip


def _target(folder: Path, name: str = "Llama") -> TargetInfo:
    if not (folder / "target").exists():
        BY_NAME[name].save(folder / "target")
    return describe_target(folder / "target")


@pytest.mark.parametrize(
    ("layer_ids", "drafter", "missing"),
    [
        ([1, 2], {}, [LAYERS]),
        ([1, LAYERS], {"layer_ids": [2, 1]}, [2]),
        ([1, 2], {"kind": "eagle"}, [LAYERS]),
    ],
)
def test_layers_that_training_lacks_are_said_before_extraction(
    layer_ids: list[int],
    drafter: dict[str, Any],
    missing: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _target(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    recipe = _recipe(tmp_path, {"layer_ids": layer_ids, "held_out_fraction": 0.0}, drafter=drafter)
    said = rf"layers \{missing}".replace("]", r"\]")
    with pytest.raises(UserError, match=said):
        extract.run_extract(recipe, tmp_path / "run", training_follows=True)
    assert not (tmp_path / "run").exists()

    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    done = CliRunner().invoke(app, ["run", str(path), "--plan"])
    assert isinstance(done.exception, UserError)
    assert f"layers {missing}" in str(done.exception)

    # Extraction alone may be for something else: it says so and goes on.
    class _Started(Exception):
        pass

    def start(*_: Any, **__: Any) -> Any:
        raise _Started

    monkeypatch.setattr(extract, "StoreWriter", start)
    with pytest.raises(_Started):
        extract.run_extract(recipe, tmp_path / "run")
    assert f"layers {missing}" in " ".join(capsys.readouterr().err.split())


def test_a_store_in_another_order_is_refused(tmp_path: Path) -> None:
    target = _target(tmp_path)
    with pytest.raises(UserError, match="nobody can tell which state is which"):
        layer_ids_to_read(EagleOptions(), target, (LAYERS, 2), where="the store")
    with pytest.raises(UserError, match="more than once"):
        layer_ids_to_read(Eagle3Options(layer_ids=(2, 2)), target, (2, LAYERS), where="the store")
    with pytest.raises(UserError, match="from layer id 1 on"):
        layer_ids_to_read(EagleOptions(), _target(tmp_path / "mla", "DeepSeek-V3"), (0, LAYERS), where="the store")


# ---- planted errors ----


def test_a_planted_error_in_each_fact_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary factor, norm, logit scale, layer order: four of four. Every family's row goes through these checks
    (tests/integration/test_families.py)."""
    found = []
    qwen, granite = (BY_NAME[name].save(tmp_path / name) for name in ("Qwen3.5", "Granite"))

    def expect(what: str, check: Any, *arguments: Any) -> None:
        check(*arguments)  # right without the plant
        with monkeypatch.context() as planted:
            PLANTS[what](planted)
            with pytest.raises(AssertionError):
                check(*arguments)
        found.append(what)

    expect("rotary factor", check_rope, shape_of(ROPES["partial"]), POSITIONS)
    expect("norm", check_facts, qwen, tmp_path / "Qwen3.5")
    expect("logit scale", check_facts, granite, tmp_path / "Granite")
    target = _target(tmp_path)
    expect("layer order", lambda: check_layer_order(_recipe(tmp_path, {"layer_ids": [LAYERS, 1]}), target))
    assert found == list(PLANTS)


def _whole_heads(planted: pytest.MonkeyPatch) -> None:
    original = decoder.rotary_embedding
    planted.setattr(
        decoder,
        "rotary_embedding",
        lambda config: original(dataclasses.replace(config, rope_parameters=ROPES["default"])),
    )


def _plain_norm(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(family.FAMILIES, "qwen3_5_text", family.Family())


def _unscaled(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(family.FAMILIES, "granite", family.Family())


def _as_written(planted: pytest.MonkeyPatch) -> None:
    recipe = _recipe(Path("folder"), {"layer_ids": [1, LAYERS]})
    unsorted = recipe.model_copy(update={"extract": recipe.extract.model_copy(update={"layer_ids": (LAYERS, 1)})})
    planted.setattr(sys.modules[__name__], "_recipe", lambda *_: unsorted)


PLANTS = {
    "rotary factor": _whole_heads, "norm": _plain_norm, "logit scale": _unscaled, "layer order": _as_written,
}  # fmt: skip


TRAINED = ["Gemma 2", "Granite", "Cohere", "DeepSeek-V3", "OPT", "Qwen3.5"]


@pytest.mark.parametrize("name", TRAINED)
def test_drafters_of_every_kind_are_trained_and_converted(name: str, tmp_path: Path) -> None:
    """From prompts to the directory that vLLM loads, without vLLM."""
    _target(tmp_path, name)
    rows = [json.dumps({"prompt": text}) for text in ("one two", "three four five", "six", "seven eight")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    options = {"backend": "transformers", "max_tokens": 12, "held_out_fraction": 0.0}
    trained = {"epochs": 1, "tokens_per_step": 64, "ttt_steps": 2}
    for kind in KINDS:
        if name in ("Gemma 2", "Cohere") and kind == "eagle":  # vLLM finds no head there
            continue
        if name == "OPT" and kind not in ("medusa", "mlp_speculator"):  # they read what vLLM does not hand out
            continue
        recipe = _recipe(tmp_path, options, drafter={"kind": kind}, **trained)
        extract.run_extract(recipe, tmp_path / "run", training_follows=True)  # the second time it does nothing
        run_dir = tmp_path / kind
        run_dir.mkdir()
        (run_dir / "store").symlink_to(tmp_path / "run" / "store")
        figures = run_train(recipe, run_dir)
        assert math.isfinite(figures["epochs"][-1]["loss"])
        run_convert(recipe, run_dir)
        assert inspect(run_dir / "vllm")["good"]


def test_a_window_of_all_layers_is_the_drafters_too() -> None:
    assert target_facts(BY_NAME["Mistral"].config()).sliding_window == 256
    for name in ("Gemma 3", "gpt-oss", "Llama"):
        assert target_facts(BY_NAME[name].config()).sliding_window is None


def test_the_table_of_the_documents_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "supported.md").read_text()
    for tiny in FAMILIES:
        assert f"| {tiny.name} | `{tiny.model_type}` |" in page


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "MiniMax"])
def test_linear_attention_takes_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs vLLM 0.32 computes it wrongly while it speculates or hands out states, without an error."""
    config = language_config(BY_NAME[name].config())
    with pytest.raises(UserError, match=r"has layers of linear attention .*Use a GPU"):
        require_full_attention(config, target=name)
    with pytest.raises(UserError, match="has layers of linear attention"):
        method_config(Suffix(method="suffix"), SimpleNamespace(config=config, name=name), own_drafter=Path("none"))  # type: ignore[arg-type]
    assert method_config(NoSpeculation(method="none"), SimpleNamespace(config=config), own_drafter=Path("none")) is None  # type: ignore[arg-type]
    require_full_attention(BY_NAME["Gemma 3"].config(), target="Gemma 3")
    monkeypatch.setattr("draftsmith.engine.environment.is_cpu", lambda: False)
    require_full_attention(config, target=name)
