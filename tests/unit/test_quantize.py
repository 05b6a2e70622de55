"""8-bit weights: the files, reading them back, and refusals."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from draftsmith.config.drafters import KINDS
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import convert_checkpoint, read, recognize
from draftsmith.convert.formats import FORMATS
from draftsmith.convert.inspection import inspect
from draftsmith.convert.quantize import SCHEMES, quantized_bytes
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.engine.speculation import speculative_config
from draftsmith.run.errors import UserError
from draftsmith.run.weights import Weight
from draftsmith.serve import proposals
from tests.unit.test_formats import EAGLE3, checkpoints, holders, make_checkpoint

LINEAR = ("fc.weight", "_proj.weight", "lm_head.weight")


def drafter(dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    return make_checkpoint("eagle3", EAGLE3 | {"fc_norm": True}, dtype, 3)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(checkpoints(), st.sampled_from(sorted(SCHEMES)))
def test_quantized_and_read_back(tmp_path: Path, found: Checkpoint, scheme: str) -> None:
    folder = tmp_path / "quantized"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    eight_bits = FORMATS["vllm"].layouts[found.kind].eight_bits
    if eight_bits is None or "vllm" not in holders(found):
        with pytest.raises(UserError, match=r"Leave --quantize out|cannot express"):
            FORMATS["vllm"].write(found, folder, quantize=scheme)
        return
    FORMATS["vllm"].write(found, folder, quantize=scheme)
    again = FORMATS["vllm"].read(folder, found.kind, target=UNKNOWN_TARGET, known={})
    assert again.config == found.config
    assert torch.equal(again.draft_token_ids, found.draft_token_ids)
    assert again.weights.keys() == found.weights.keys()
    for name, weight in found.weights.items():
        before, after = weight.tensor(), again.weights[name].tensor()
        assert after.dtype == before.dtype
        if not name.endswith(LINEAR) or name.split(".")[-2] in floating(found, scheme):
            assert torch.equal(after, before), name
            continue
        assert not torch.equal(after, before), name
        before, after = before.double(), after.double()
        largest = before.abs().amax(1, keepdim=True)
        # Half of one of 255 steps, or of E4M3's precision; plus the rounding of the scale's dtype.
        step = largest / 127 if scheme != "fp8" else torch.maximum(before.abs() / 8, largest / 448 / 512)
        rounding = largest * torch.finfo(weight.dtype).eps
        assert bool(((before - after).abs() <= 0.51 * step + 2 * rounding).all()), name


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(checkpoints(), st.sampled_from(["fp8", "int8-dynamic"]))
def test_the_size_is_known_beforehand(tmp_path: Path, found: Checkpoint, scheme: str) -> None:
    eight_bits = FORMATS["vllm"].layouts[found.kind].eight_bits
    if eight_bits is None or "vllm" not in holders(found):
        return
    FORMATS["vllm"].write(found, tmp_path, quantize=scheme)
    held = load_file(tmp_path / "model.safetensors")
    size = sum(tensor.nbytes for name, tensor in held.items() if name not in ("d2t", "t2d"))
    shapes = {name: weight.shape for name, weight in found.weights.items()}
    (dtype,) = {weight.dtype for weight in found.weights.values()}
    assert quantized_bytes(shapes, but=floating(found, scheme), scale_bytes=dtype.itemsize) == size


def floating(found: Checkpoint, scheme: str) -> tuple[str, ...]:
    eight_bits = FORMATS["vllm"].layouts[found.kind].eight_bits
    assert eight_bits is not None
    return eight_bits.floating(rounds_inputs=SCHEMES[scheme].inputs is not None)


def test_a_recipe_knows_which_kinds_have_them() -> None:
    """It is refused when it is read, not after the drafter was trained."""
    assert {kind: options.serving.eight_bits for kind, options in KINDS.items()} == {
        kind: FORMATS["vllm"].layouts[kind].eight_bits is not None for kind in KINDS
    }
    for kind, options in KINDS.items():
        section = {
            "name": "r",
            "target": {"model": "a/b"},
            "train": {"drafter": {"kind": kind}},
            "convert": {"quantize": "int8"},
        }
        section["evaluate"] = {"k": [1], "acceptance_k": 1}
        if options.serving.eight_bits:
            assert Recipe.model_validate(section).convert.quantize == "int8"
            continue
        with pytest.raises(ValidationError, match=rf"no 8-bit weights of drafters of the kind `{kind}`"):
            Recipe.model_validate(section)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_vllm_s_second_runner_compares_eagle_3_s_head(tmp_path: Path, scheme: str) -> None:
    """It reads the head's `weight`, and compares it with the target's: it must be there, and not in 8-bit floats."""
    FORMATS["vllm"].write(drafter(), tmp_path, quantize=scheme)
    held = load_file(tmp_path / "model.safetensors")
    assert held["lm_head.weight"].dtype == (torch.int8 if scheme == "int8-dynamic" else torch.bfloat16)
    torch.equal(held["lm_head.weight"], torch.zeros_like(held["lm_head.weight"], dtype=torch.bfloat16))


def test_what_the_files_hold(tmp_path: Path) -> None:
    """Golden: four integers per word, lowest first, offset by 128; scales of 255 steps over the range."""
    made = drafter(torch.float32)
    wide = torch.zeros(made.weights["fc.weight"].shape)
    wide[:, :6] = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.25, -0.125])
    FORMATS["vllm"].write(
        replace(made, weights={**made.weights, "fc.weight": Weight.of(wide)}), tmp_path, quantize="int8"
    )
    held = load_file(tmp_path / "model.safetensors")
    assert torch.allclose(held["fc.weight_scale"], torch.tensor(2 / 255))
    assert held["fc.weight_shape"].tolist() == [*wide.shape]
    words = held["fc.weight_packed"][0]
    numbers = [(int(word) >> 8 * place & 255) - 128 for word in words for place in range(4)]
    # 1.0 is 127.5 steps of 2/255, which float32 rounds up.
    assert numbers == [127, -127, 64, 0, 32, -16, *[0] * (wide.shape[1] - 6)]
    assert not any(name.endswith((".weight_zero_point", "norm.weight_scale")) for name in held)
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "pack-quantized")


def test_into_other_formats_and_back(tmp_path: Path) -> None:
    drafter().save(tmp_path)
    with pytest.raises(UserError, match="--quantize goes with --to vllm"):
        convert_checkpoint(tmp_path, tmp_path / "own", to="draftsmith", quantize="int8")
    with pytest.raises(UserError, match="or write the format vllm"):
        convert_checkpoint(tmp_path, tmp_path / "other", to="speculators", quantize="int8")
    figures = convert_checkpoint(tmp_path, tmp_path / "small", to="vllm", quantize="int8", verify=True)
    plain = convert_checkpoint(tmp_path, tmp_path / "plain", to="vllm")
    assert 0 < figures["verified"]["relative_difference"] < 0.5
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "plain")]
    assert sizes[0] < sizes[1]
    assert figures["parameters"] == plain["parameters"]
    assert "8-bit integers" in (tmp_path / "small" / "README.md").read_text()
    assert inspect(tmp_path / "small")["good"]
    # Converted back: exactly the values of the quantized checkpoint, in floating point.
    convert_checkpoint(tmp_path / "small", tmp_path / "back", to="draftsmith", verify=True)
    held = read(tmp_path / "small", recognize(tmp_path / "small"))
    for name, weight in read(tmp_path / "back", recognize(tmp_path / "back")).weights.items():
        assert torch.equal(weight.tensor(), held.weights[name].tensor())


def test_floats_are_inspected(tmp_path: Path) -> None:
    drafter().save(tmp_path)
    convert_checkpoint(tmp_path, tmp_path / "small", to="vllm", quantize="fp8")
    assert inspect(tmp_path / "small")["good"]


def test_served_where_there_is_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter().save(tmp_path)
    for scheme in SCHEMES:
        convert_checkpoint(tmp_path, tmp_path / scheme, to="vllm", quantize=scheme)
    monkeypatch.setattr("draftsmith.engine.environment.is_cpu", lambda: True)
    assert speculative_config(tmp_path / "int8-dynamic", 3)["method"] == "eagle3"
    for scheme in ("int8", "fp8"):
        with pytest.raises(UserError, match="On a CPU serve one converted with `int8-dynamic`"):
            speculative_config(tmp_path / scheme, 3)
    monkeypatch.setattr("draftsmith.engine.environment.is_cpu", lambda: False)
    assert all(speculative_config(tmp_path / scheme, 3) for scheme in SCHEMES)


@pytest.mark.parametrize(("scheme", "on_cpu", "dtype", "compared"), [
    ("int8-dynamic", True, "float32", False), ("int8-dynamic", False, "bfloat16", False), ("int8", False, "bfloat16", False),
    (None, True, "float32", True), (None, False, "float32", True),
])  # fmt: skip
def test_verified_in_a_dtype_that_there_are_kernels_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str | None, on_cpu: bool, dtype: str, compared: bool
) -> None:
    drafter().save(tmp_path)
    convert_checkpoint(tmp_path, tmp_path / "out", to="vllm", quantize=scheme)
    monkeypatch.setattr("draftsmith.engine.environment.is_cpu", lambda: on_cpu)
    counters = {f"vllm:spec_decode_num_{name}": 1.0 for name in ("draft_tokens", "accepted_tokens")}
    asked = mock.Mock(return_value=[proposals.Served([], counters)])
    monkeypatch.setattr(proposals, "record", asked)
    monkeypatch.setattr(proposals, "tokenizer_of", mock.Mock())
    monkeypatch.setattr(proposals, "_prompt", lambda tokenizer, text: [1, 2])
    monkeypatch.setattr(proposals, "compare_proposals", mock.Mock(return_value=[7]))
    found = proposals.verify_served(tmp_path / "out", mock.Mock(max_draft_tokens=None), tmp_path)
    assert asked.call_args.kwargs["dtype"] == dtype
    assert found.get("proposals") == ([7] if compared else None)


def _section(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        record = json.loads((folder / "config.json").read_text())
        change(record["quantization_config"])
        (folder / "config.json").write_text(json.dumps(record))

    return damage


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_section(lambda s: s.update(format=[])), "quantized in an unsupported way"),
        (_section(lambda s: s.update(quant_method="gptq")), "quantized in an unsupported way"),
        (_section(lambda s: s.update(format="nvfp4-pack-quantized")), "quantized in an unsupported way"),
        (_section(lambda s: s.update(kv_cache_scheme={"num_bits": 8})), "quantized in an unsupported way"),
        (_section(lambda s: s["config_groups"].update(more={})), "quantized in an unsupported way"),
        (_section(lambda s: s["config_groups"]["group_0"]["weights"].update(num_bits=4)), "asks for .*'num_bits': 4"),
        (_section(lambda s: s["config_groups"]["group_0"]["weights"].update(symmetric=False)), "asks for"),
        (_section(lambda s: s["config_groups"]["group_0"].update(weights={"num_bits": "many"})), "is not valid for compressed-tensors"),
        (_section(lambda s: s["config_groups"].update(group_0=[])), "asks for|is not valid for compressed-tensors"),
        (_tensors(lambda t: t.pop("fc.weight_packed")), "fc has a scale but no weight"),
        (_tensors(lambda t: t.pop("fc.weight_shape")), "fc has a scale but no weight"),
        (_tensors(lambda t: t.pop("fc.weight_scale")), "has no tensors .*fc.weight_packed"),
        (_tensors(lambda t: t.update({"fc.weight_shape": torch.tensor([16, 4000])})), "One of them is damaged"),
        (_tensors(lambda t: t.update({"fc.weight_shape": torch.tensor([16.0, 48.0])})), "One of them is damaged"),
        (_tensors(lambda t: t.update({"fc.weight_scale": torch.ones(3, 1)})), "fc: the weight is"),
        (_tensors(lambda t: t.update({"fc.weight_packed": t["fc.weight_packed"].long()})), "fc: the weight is"),
        (_tensors(lambda t: t.update({"fc.weight_zero_point": torch.ones(16, 1)})), "has no tensors"),
    ],
)  # fmt: skip
def test_damaged(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    FORMATS["vllm"].write(drafter(), tmp_path / "small", quantize="int8")
    damage(tmp_path / "small")
    with pytest.raises(UserError, match=message):
        convert_checkpoint(tmp_path / "small", tmp_path / "out", to="draftsmith")
    assert not (tmp_path / "out").exists()
