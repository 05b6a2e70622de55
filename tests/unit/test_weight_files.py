"""Targets whose weights are PyTorch's files, or partly in 8 bits: embedding, head and norm are the model's own."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from draftsmith.config.evaluation import EvaluateConfig
from draftsmith.engine.memory import weight_bytes
from draftsmith.engine.process import EngineProcess
from draftsmith.extract.extract import run_extract
from draftsmith.run.errors import UserError
from draftsmith.target import weight_files
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors, require_readable
from draftsmith.target.weight_files import read_weight
from tests.quantized_target import SCHEME, quantize
from tests.unit.fake_engine import make_recipe_and_run
from tests.unit.test_target import save_model


def to_bin(folder: Path, *, shards: int = 1) -> None:
    """Replace safetensors by the files that `save_pretrained` wrote before: tied tensors are in them twice."""
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    places = {
        name: f"pytorch_model-{number % shards + 1:05d}-of-{shards:05d}.bin" for number, name in enumerate(tensors)
    }
    for file in {*places.values()}:
        torch.save({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_pytorch_files_are_read_like_safetensors(tmp_path: Path, tied: bool, shards: int) -> None:
    save_model(tmp_path / "safetensors", tied=tied)
    shutil.copytree(tmp_path / "safetensors", tmp_path / "bin")
    to_bin(tmp_path / "bin", shards=shards)
    expected, found = (load_target_tensors(tmp_path / name) for name in ("safetensors", "bin"))
    assert torch.equal(found.embedding, expected.embedding)
    assert torch.equal(found.lm_head, expected.lm_head)
    assert (found.lm_head is found.embedding) == tied
    assert torch.equal(found.final_norm_weight, expected.final_norm_weight)
    twice = expected.embedding.numel() * 2 if tied else 0
    assert weight_bytes(tmp_path / "bin", "bfloat16") == weight_bytes(tmp_path / "safetensors", "bfloat16") + twice


def test_pytorch_files_tell_fine_tunes_apart(tmp_path: Path) -> None:
    revisions = []
    for seed in (0, 1):
        save_model(tmp_path / str(seed), seed=seed)
        to_bin(tmp_path / str(seed))
        revisions.append(describe_target(tmp_path / str(seed)).revision)
    assert revisions[0] != revisions[1]


class Evil:
    def __reduce__(self) -> Any:
        return open, ("ran", "w")


def test_pytorch_files_run_no_code_and_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path)
    to_bin(tmp_path)
    torch.save({"model.embed_tokens.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds more than tensors"):
        load_target_tensors(tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"cannot be read|holds more than tensors"):
        load_target_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors and no pytorch_model\.bin"):
        load_target_tensors(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    save_model(tmp_path)
    to_bin(tmp_path, shards=3)
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(UserError, match="pytorch_model-00002-of-00003"):
        load_target_tensors(tmp_path)


# ---- in 8 bits ----


@pytest.mark.parametrize("head", [True, False])
def test_a_w8a8_target_s_tensors(tmp_path: Path, head: bool) -> None:
    """What compressed-tensors leaves alone is exact, and a head in 8 bits is what the library itself makes of it."""
    state = save_model(tmp_path)
    quantize(tmp_path, head=head)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert (stored["lm_head.weight"].dtype == torch.int8) == head
    tensors = load_target_tensors(tmp_path)
    assert torch.equal(tensors.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(tensors.final_norm_weight, state["model.norm.weight"])
    if not head:
        assert torch.equal(tensors.lm_head, state["lm_head.weight"])
        return
    parts = {name: stored[f"lm_head.{name}"] for name in ("weight", "weight_scale")}
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": SCHEME})
    library = BaseCompressor.get_value_from_registry("int-quantized").decompress(parts, scheme)["weight"]
    torch.testing.assert_close(tensors.lm_head, library.float())
    assert ((tensors.lm_head - state["lm_head.weight"]).abs() <= stored["lm_head.weight_scale"] * 0.501).all()
    assert not torch.equal(tensors.lm_head, state["lm_head.weight"])


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.25), torch.tensor([0.25]), torch.full((6,), 0.25), torch.full((6, 1), 0.25)]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_of_a_tensor_and_of_rows(tmp_path: Path, scale: torch.Tensor, dtype: torch.dtype) -> None:
    """As FP8 checkpoints hold them too."""
    values = torch.arange(-12, 12).reshape(6, 4)
    files = save(tmp_path, {"lm_head.weight": values.to(dtype), "lm_head.weight_scale": scale})
    assert torch.equal(read_weight(files, "lm_head.weight"), values / 4)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({}, "torch.int8, no scale"),
        ({"weight_scale": torch.ones(6, 2)}, r"scales of shape \[6, 2\]"),
        ({"weight_scale": torch.ones(3, 2)}, r"scales of shape \[3, 2\]"),
        ({"weight_scale": torch.ones(6, 1), "weight_zero_point": torch.ones(6, 1, dtype=torch.int8)}, "zero points"),
    ],
)
def test_other_scales_are_refused(tmp_path: Path, beside: dict[str, torch.Tensor], said: str) -> None:
    """Groups and blocks: 3 x 2 scales are as many as rows."""
    tensors = {"weight": torch.ones(6, 4, dtype=torch.int8), **beside}
    files = save(tmp_path, {f"lm_head.{name}": value for name, value in tensors.items()})
    with pytest.raises(
        UserError, match=rf"lm_head\.weight in .* is quantized in a way that Draftsmith does not read .*{said}"
    ):
        read_weight(files, "lm_head.weight")


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Path]:
    save_file(tensors, folder / "model.safetensors")
    return dict.fromkeys(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("read", [load_target_tensors, require_readable])
@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_packed_weights_are_refused_in_words(tmp_path: Path, module: str, read: Any) -> None:
    """As AWQ and GPTQ store them."""
    save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{module}.qweight"] = tensors.pop(f"{module}.weight").to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="quantized in a way that Draftsmith does not read") as caught:
        read(tmp_path)
    assert f"({module}.qweight)" in str(caught.value)


@pytest.mark.parametrize("kind", ["whole", "8 bits", "pytorch"])
def test_what_training_can_read_is_told_without_reading_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path)
    if kind == "8 bits":
        quantize(tmp_path, head=True)
    elif kind == "pytorch":
        to_bin(tmp_path, shards=3)
    read: list[str] = []
    plain = weight_files.read_tensor
    monkeypatch.setattr(weight_files, "read_tensor", lambda path, name: read.append(name) or plain(path, name))
    require_readable(tmp_path)
    assert read == (["lm_head.weight_scale"] if kind == "8 bits" else [])


def test_a_head_that_training_could_not_read_is_refused_before_extraction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, _ = make_recipe_and_run(tmp_path)
    options = recipe.extract.model_copy(update={"held_out_fraction": 0.0, "max_tokens": 20})
    recipe = recipe.model_copy(update={"extract": options, "evaluate": EvaluateConfig()})
    monkeypatch.setattr(EngineProcess, "__init__", mock.Mock(side_effect=RuntimeError("an engine was started")))
    weights = tmp_path / "target" / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight in .*torch\.int8, no scale"):
        run_extract(recipe, tmp_path / "new", training_follows=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(RuntimeError, match="an engine was started"):
        run_extract(recipe, tmp_path / "new")
    assert "not enough for this recipe's training: lm_head.weight in" in capsys.readouterr().err


def test_weights_that_vllm_quantizes_as_it_loads_them_are_counted_so(tmp_path: Path) -> None:
    state = save_model(tmp_path)
    matrices = sum(value.numel() for value in state.values() if value.ndim > 1)
    plain = weight_bytes(tmp_path, "bfloat16")
    assert weight_bytes(tmp_path, "bfloat16", "fp8") == plain - matrices
    to_bin(tmp_path)
    assert weight_bytes(tmp_path, "bfloat16", "fp8") == plain - matrices
    assert weight_bytes(tmp_path, "bfloat16", "unheard-of") == plain - matrices * 3 // 2
