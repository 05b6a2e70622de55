"""Engines with `engine.options`, targets with code of their own and quantized ones: what is extracted is what is served."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.extract.extract import run_extract
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, Generated
from draftsmith.store.reader import Store
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import make_target, reference_states, write_recipe
from tests.quantized_target import quantize

pytestmark = pytest.mark.integration

PROMPTS = ["Name three rivers.", "Why is the sky blue?", "Hi", "Count to ten in French, please."]
_CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""


def extract(recipe: Recipe, folder: Path) -> Store:
    run_extract(recipe, folder / "run")
    return Store(folder / "run" / "store")


def serve(recipe: Recipe, log_dir: Path) -> EngineHost:
    """The baseline's engine of an evaluation of this recipe."""
    spec = EngineSpec(
        name="baseline",
        target=str(recipe.target.model),
        dtype=recipe.target.dtype,
        engine=recipe.engine,
        trust_remote_code=recipe.target.trust_remote_code,
    )
    return EngineHost(spec, log_dir).start()


def answers(host: EngineHost, store: Store) -> list[Generated]:
    prompts = [sequence.token_ids[~sequence.loss_mask].tolist() for sequence in store]
    return host.generate(prompts, max_tokens=16)[0]


def test_options_reach_extraction_and_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rotary base of 100 in the place of the config's 10,000: the states and the answers are those of a model that has it. The
    config can only be read with the target's own code."""
    target = tmp_path / "target"
    make_target(target)
    config = json.loads((target / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 100.0}
    as_it_is, changed = (
        AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, rope_parameters=parameters).eval()
        for parameters in (config["rope_parameters"], rope)
    )
    (target / "configuration_own.py").write_text(_CONFIGURATION)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (target / "config.json").write_text(json.dumps(config | own))
    path = write_recipe(
        tmp_path,
        target,
        PROMPTS[1:],
        PROMPTS[:1],
        extract={"max_tokens": 16, "layer_ids": [1, 2, 3]},
        engine={"max_model_len": 128, "options": {"hf_overrides": {"rope_parameters": rope}, "async_scheduling": True}},
    )
    recipe = load_recipe(path, ["target.trust_remote_code=true"])
    store = extract(recipe, tmp_path)
    assert "engine.options.async_scheduling is not used here" in capsys.readouterr().err
    assert (
        json.loads((tmp_path / "run" / "store" / "stage.json").read_text())["recipe"]["engine"]["options"]
        == recipe.engine.options
    )
    assert len(store) == len(PROMPTS)
    for sequence in store:
        inputs = sequence.token_ids[: len(sequence.hidden_states)]
        expected, other = (reference_states(model, inputs, (1, 2, 3)) for model in (changed, as_it_is))
        assert _difference(sequence.hidden_states, expected) < 1e-4
        assert _difference(sequence.hidden_states, other) > 1e-2, "the test could not tell"
    with serve(recipe, tmp_path) as host:
        for sequence, answer in zip(store, answers(host.wait_ready(), store), strict=True):
            assert answer.token_ids == sequence.token_ids[sequence.loss_mask].tolist()


def test_a_quantized_target_is_extracted_as_it_is_served(tmp_path: Path) -> None:
    """W8A8: logits from the stored states, by the norm and head that training reads, are those of the engine that serves."""
    target, plain = tmp_path / "target", tmp_path / "plain"
    make_target(target)
    make_target(plain)
    quantize(target)
    layers = {"max_tokens": 16, "layer_ids": [1, 2, 3]}
    path = write_recipe(tmp_path, target, PROMPTS[1:], PROMPTS[:1], extract=layers, engine={"max_model_len": 128})
    recipe = load_recipe(path)
    store = extract(recipe, tmp_path)
    tensors = load_target_tensors(target)
    unquantized = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    compared = 0
    with serve(recipe, tmp_path) as host:
        for sequence, answer in zip(store, answers(host.wait_ready(), store), strict=True):
            ids, prompt = sequence.token_ids, int((~sequence.loss_mask).sum())
            assert answer.token_ids == ids[prompt:].tolist()
            states = sequence.hidden_states
            normed = torch.nn.functional.rms_norm(states[:, -1], states.shape[-1:], tensors.final_norm_weight, 1e-6)
            logits = normed @ tensors.lm_head.T
            assert torch.equal(logits[prompt - 1 :].argmax(-1).int(), ids[prompt:])
            for position in range(prompt - 1, len(states), 4):
                first, second = logits[position].topk(2).indices.tolist()
                margin = host.logit_margin(ids[: position + 1].tolist(), first, second)
                assert margin == pytest.approx(float(logits[position, first] - logits[position, second]), abs=1e-3)
                compared += 1
            rounding = _difference(states, reference_states(unquantized, ids[: len(states)], (1, 2, 3)))
            # 0.25 on a processor with AVX2 alone, perhaps because its products of 8 bits saturate in 16; less on others.
            assert 1e-3 < rounding < 0.4, "8 bits were not what ran"
    assert compared >= len(PROMPTS)


def _difference(states: torch.Tensor, expected: torch.Tensor) -> float:
    return float((states - expected).norm() / expected.norm())
