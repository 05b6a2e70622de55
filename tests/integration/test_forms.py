"""Targets in other forms than safetensors in floating point, and a quantized KV cache, in real engines: the states are those of the
model that the files mean, and training reads its embedding, norm and head from them."""

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import quantization
from draftsmith.engine.environment import states_arguments
from draftsmith.extract.extract import run_extract
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.target.tensors import load_target_tensors
from tests.families import TinyFamily
from tests.integration.conftest import make_target, reference_states, write_recipe
from tests.quantized_target import in_fp8, quantize_awq, quantize_fp8_rows, quantize_gptq
from tests.seeing import LLAMA
from tests.soak import SOAKING
from tests.unit.test_weight_files import to_bin

pytestmark = pytest.mark.integration

PROMPTS = ["Name three rivers.", "Why is the sky blue?", "Hi", "Count to ten in French, please."]
LAYER_IDS = (1, 2, 3)


def extract(target: Path, folder: Path, *, dtype: str = "float32", options: Mapping[str, str] = {}) -> Store:
    folder.mkdir(exist_ok=True)
    path = write_recipe(
        folder,
        target,
        PROMPTS[1:],
        PROMPTS[:1],
        engine={"max_model_len": 128, "options": dict(options)},
        extract={"max_tokens": 16, "layer_ids": [*LAYER_IDS]},
    )
    run_extract(load_recipe(path, [f"target.dtype={dtype}"]), folder / "run")
    store = Store(folder / "run" / "store")
    assert len(store) == len(PROMPTS)
    return store


def rounding(sequence: Sequence, model: AutoModelForCausalLM) -> float:
    """How far a sequence's states are from a model's, relative to these."""
    expected = reference_states(model, sequence.token_ids[: len(sequence.hidden_states)], LAYER_IDS)
    return float((sequence.hidden_states.float() - expected).norm() / expected.norm())


def test_pytorch_files_give_the_states_of_safetensors(tmp_path: Path) -> None:
    make_target(tmp_path / "safetensors")
    whole = extract(tmp_path / "safetensors", tmp_path / "whole")
    for shards in (1, 3) if SOAKING else (3,):  # files are named in an index, or not
        target = tmp_path / f"bin-{shards}"
        shutil.copytree(tmp_path / "safetensors", target)
        to_bin(target, shards=shards)
        assert not [*target.glob("*.safetensors")]
        for one, other in zip(extract(target, tmp_path / str(shards)), whole, strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
            torch.testing.assert_close(one.hidden_states, other.hidden_states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("quantize", "dtype", "apart"),
    [(quantize_awq, "float16", 0.15), (quantize_gptq, "float16", 0.15), (quantize_fp8_rows, "float32", 0.08)],
    ids=["awq", "gptq", "fp8"],
)
def test_quantized_targets_are_extracted_as_they_are_served(
    quantize: Callable[[Path], dict[str, torch.Tensor]], dtype: str, apart: float, tmp_path: Path
) -> None:
    """The engine computes with the weights that the file means, and its answers follow from the stored states by the norm and the head
    that training reads."""
    target = tmp_path / "target"
    make_target(target)
    if quantize in (quantize_awq, quantize_gptq) and not quantization._has_avx512():
        quantize(target)
        with pytest.raises(UserError, match="on processors with AVX-512 only"):
            extract(target, tmp_path, dtype=dtype)
        return
    plain, shared = (
        AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(),
        load_target_tensors(target),
    )
    meant = copy.deepcopy(plain)
    meant.load_state_dict(quantize(target), strict=False)
    if quantize is quantize_fp8_rows:
        for module in meant.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (in_fp8(inputs[0]),))
    tensors = load_target_tensors(target)
    for name in ("embedding", "lm_head", "final_norm_weight"):
        assert torch.equal(getattr(tensors, name), getattr(shared, name))
    for sequence in extract(target, tmp_path, dtype=dtype):
        states, prompt = sequence.hidden_states.float(), int((~sequence.loss_mask).sum())
        assert states.isfinite().all()
        assert rounding(sequence, meant) < 0.01
        assert rounding(sequence, plain) > apart, "the weights were not quantized"
        normed = torch.nn.functional.rms_norm(states[:, -1], states.shape[-1:], tensors.final_norm_weight, 1e-6)
        logits = (normed @ tensors.lm_head.T)[prompt - 1 :]
        chosen = logits.gather(1, sequence.token_ids[prompt:, None].long())[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.02, "its own logits are rounded to float16"


@pytest.mark.skipif(
    not (quantization._has_amx() or quantization._has_avx512()), reason="vLLM's CPU build needs AVX-512 or AMX for it"
)
def test_a_quantized_kv_cache_is_the_engine_s_own(tmp_path: Path) -> None:
    """`engine.options.kv_cache_dtype: fp8`: keys and values are rounded to 8 bits, the states are not."""
    target = tmp_path / "target"
    make_target(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for sequence in extract(target, tmp_path, options={"kv_cache_dtype": "fp8"}):
        assert 0.01 < rounding(sequence, model) < 0.1


def test_logits_through_the_transformers_backend_have_their_factor(tmp_path: Path) -> None:
    """Granite's, with experts: vLLM's backend does not know it by Granite's name for it."""
    family = TinyFamily(
        "", "granitemoe", LLAMA.fields | {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 7.0}
    )
    model = family.save(tmp_path / "target")
    arguments = states_arguments(model.config, {})
    engine = EngineConfig(max_model_len=128, kv_cache_gib=0.2).model_copy(update={"options": arguments})
    prompt = torch.arange(40, 60)
    with torch.no_grad():
        logits = model(prompt[None]).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    margin = float(logits[first] - logits[second])
    spec = EngineSpec(name="backend", target=str(tmp_path / "target"), dtype="float32", engine=engine)
    with EngineHost(spec, tmp_path).start() as host:
        assert host.wait_ready().logit_margin(prompt.tolist(), first, second) == pytest.approx(margin, rel=1e-3)
