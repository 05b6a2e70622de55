"""Published formats: round trips, recognition, conversion, and damaged or hostile files."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.drafters import KINDS
from draftsmith.convert.convert import NATIVE, convert_checkpoint, read, recognize
from draftsmith.convert.formats import FORMATS
from draftsmith.convert.model_card import render
from draftsmith.convert.verify import compare
from draftsmith.convert.vocabulary import from_tensors, to_tensors, with_vocabulary
from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import EMBEDDING, UNKNOWN_TARGET, Checkpoint
from draftsmith.drafters.layout import Entry, Source
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.weights import Weight, in_memory, open_weights, write_safetensors
from draftsmith.store.format import Sequence
from draftsmith.store.writer import StoreWriter
from tests.unit.test_exchange import IDENTITY

VOCAB = 40
TARGET = {"name": "owner/target", "revision": "abc", "config_hash": "0" * 64}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
]  # fmt: skip


def layers(draw: st.DrawFn) -> dict[str, Any]:
    kv = draw(st.sampled_from([1, 2]))
    return {
        "hidden_size": 16, "intermediate_size": draw(st.sampled_from([12, 24])), "num_attention_heads": 2,
        "num_key_value_heads": kv, "head_dim": draw(st.sampled_from([4, 8])), "hidden_act": "silu",
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])), "rope_parameters": draw(st.sampled_from(ROPES)),
        "max_position_embeddings": 128, "vocab_size": VOCAB, "num_layers": draw(st.sampled_from([1, 1, 2])),
    }  # fmt: skip


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    """Any drafter of any kind."""
    kind = draw(st.sampled_from(["eagle", "eagle3", "p_eagle", "dflash", "dspark", "medusa", "mlp_speculator"]))
    flag = st.booleans()
    window = st.sampled_from([None, None, 1, 2048])
    config: dict[str, Any]
    if kind == "eagle":
        config = layers(draw) | {
            "layer_ids": [5],
            "draft_vocab_size": VOCAB,
            "noise": draw(st.sampled_from([0.0, 0.2])),
        }
        config |= {"attention_bias": draw(flag), "fc_bias": draw(flag)}
    elif kind in ("eagle3", "p_eagle"):
        usual = draw(flag)
        config = layers(draw) | {
            "layer_ids": [2, 5, 8] if usual else draw(st.sampled_from([[0, 2], [1, 2, 3, 4]])),
            "draft_vocab_size": draw(st.sampled_from([VOCAB, 7, 30])),
            "target_hidden_size": draw(st.sampled_from([None, 20])), "attention_bias": draw(st.sampled_from([False, False, True])),
            "sliding_window": draw(window), "qk_norm": draw(st.sampled_from([False, False, True])),
        }  # fmt: skip
        plain = draw(flag)
        config |= {name: not plain and draw(flag) for name in ("norm_before_residual", "norm_output")}
        norm = "none" if plain else draw(st.sampled_from(["fc_norm", "norm_before_fc", "none"]))
        config |= {name: norm == name for name in ("fc_norm", "norm_before_fc")}
        if kind == "p_eagle":
            config |= {"num_depths": draw(st.integers(2, 8)), "mask_token_id": draw(st.integers(0, VOCAB - 1))}
    elif kind in ("dflash", "dspark"):
        config = layers(draw) | {
            "layer_ids": draw(st.sampled_from([[2, 5, 8], [0, 2]])), "draft_vocab_size": draw(st.sampled_from([VOCAB, 7])),
            "block_size": draw(st.integers(2, 16)), "mask_token_id": draw(st.integers(0, VOCAB - 1)), "causal": draw(flag),
            "sliding_window": draw(window),
        }  # fmt: skip
        if kind == "dspark":
            heads = ("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov")
            config |= {"markov_rank": draw(st.integers(1, 4)), **{name: draw(flag) for name in heads}}
    elif kind == "medusa":
        config = {
            "layer_ids": [5], "hidden_size": 16, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
            "num_heads": draw(st.integers(1, 3)), "num_layers": draw(st.integers(1, 2)), "bias": draw(flag),
            "shared_head": draw(flag),
        }  # fmt: skip
    else:
        steps = draw(st.integers(1, 3))
        config = {
            "layer_ids": [5], "hidden_size": 16, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
            "inner_size": draw(st.sampled_from([16, 12])), "n_predict": steps, "tie_weights": steps > 1 and draw(flag),
            "scale_input": draw(flag),
        }  # fmt: skip
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    seed = draw(st.integers(0, 1000))
    return make_checkpoint(kind, config, dtype, seed, own_embedding=draw(flag))


def make_checkpoint(
    kind: str, config: dict[str, Any], dtype: torch.dtype, seed: int, *, own_embedding: bool = False
) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    typed = drafter_class(kind).config_class.from_dict(config)
    shapes = dict(drafter_class(kind).shapes(typed))
    if own_embedding and drafter_class(kind).has_embedding:
        shapes[EMBEDDING] = (VOCAB, typed.hidden_size)
    weights = {name: Weight.of(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}
    if {EMBEDDING, "mask_embedding"} <= weights.keys():  # that row is never read: some formats have the mask in it
        table = weights[EMBEDDING].tensor()
        table[config["mask_token_id"]] = weights["mask_embedding"].tensor()
        weights[EMBEDDING] = Weight.of(table)
    ids = torch.randperm(VOCAB, generator=generator)[: typed.draft_vocab_size].sort().values
    return Checkpoint(kind, typed.to_dict(), TARGET, ids, weights, {"steps": 3}).check()


EAGLE3 = {
    "hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_parameters": ROPES[0], "max_position_embeddings": 128,
    "vocab_size": VOCAB, "num_layers": 1, "layer_ids": [2, 5, 8], "draft_vocab_size": 7, "norm_before_residual": False,
    "fc_norm": False, "norm_output": False,
}  # fmt: skip
DSPARK = {name: value for name, value in EAGLE3.items() if name not in ("norm_before_residual", "fc_norm", "norm_output")} | {
    "block_size": 4, "mask_token_id": 5, "causal": False, "markov_rank": 3,
}  # fmt: skip


HOLDERS = {
    "eagle": ["vllm", "eagle"],
    "eagle3": ["vllm", "eagle3", "specforge", "speculators"],
    "p_eagle": ["vllm", "speculators"],
    "dflash": ["vllm"],
    "dspark": ["vllm", "speculators"],
    "medusa": ["medusa", "vllm"],
    "mlp_speculator": ["vllm", "ibm"],
}
"""The formats that hold the drafters of `test_every_format_is_recognized`; further ones of block drafters are in
`test_formats_of_blocks.py`."""


def holders(found: Checkpoint) -> list[str]:
    """The formats that can hold the checkpoint."""
    names = []
    for name, each in FORMATS.items():
        with suppress(UserError):
            each.to_files(found)
            names.append(name)
    return names


def assert_equal(one: Checkpoint, other: Checkpoint) -> None:
    assert (one.kind, one.config, one.target, one.training) == (other.kind, other.config, other.target, other.training)
    assert torch.equal(one.draft_token_ids, other.draft_token_ids)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        assert other.weights[name].dtype == weight.dtype
        assert torch.equal(other.weights[name].tensor(), weight.tensor()), name


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(checkpoints())
def test_there_and_back_through_every_pair(tmp_path: Path, found: Checkpoint) -> None:
    folder = tmp_path / "formats"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    found.save(folder)
    assert_equal(found, Checkpoint.load(folder).check())
    names = holders(found)
    assert "vllm" in names or found.config.get("attention_bias") or found.config.get("fc_bias")
    for name in names:
        (folder / name).mkdir()
        FORMATS[name].write(found, folder / name)
        again = FORMATS[name].read(folder / name, found.kind, target=UNKNOWN_TARGET, known={})
        assert_equal(found, again)
        for other in names:
            there, back = folder / f"{name}-{other}", folder / f"{name}-{other}-{name}"
            there.mkdir()
            back.mkdir()
            FORMATS[other].write(again, there)
            FORMATS[name].write(FORMATS[other].read(there, found.kind, target=UNKNOWN_TARGET, known={}), back)
            for file in ("config.json", FORMATS[name].weights_file):
                assert (back / file).read_bytes() == (folder / name / file).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_recognized(kind: str, tmp_path: Path) -> None:
    configs: dict[str, dict[str, Any]] = {
        "eagle3": EAGLE3,
        "p_eagle": EAGLE3 | {"num_depths": 5, "mask_token_id": 3},
        "dflash": {k: v for k, v in EAGLE3.items() if "norm" not in k or k == "rms_norm_eps"}
        | {"block_size": 5, "mask_token_id": 3, "causal": True},
        "dspark": {k: v for k, v in EAGLE3.items() if "norm" not in k or k == "rms_norm_eps"}
        | {"block_size": 5, "mask_token_id": 3, "causal": False, "markov_rank": 2},
        "eagle": {k: v for k, v in EAGLE3.items() if "norm" not in k or k == "rms_norm_eps"}
        | {"draft_vocab_size": VOCAB, "noise": 0.0, "layer_ids": [5]},
        "medusa": {"layer_ids": [5], "hidden_size": 16, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
                   "num_heads": 2, "num_layers": 1, "bias": True, "shared_head": False},
        "mlp_speculator": {"layer_ids": [5], "hidden_size": 16, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
                           "draft_vocab_size": VOCAB, "inner_size": 12, "n_predict": 3, "tie_weights": True,
                           "scale_input": True},
    }  # fmt: skip
    found = make_checkpoint(kind, configs[kind], torch.float32, 0)
    assert holders(found) == HOLDERS[kind]
    for name in HOLDERS[kind]:
        (tmp_path / name).mkdir()
        FORMATS[name].write(found, tmp_path / name)
        told = recognize(tmp_path / name)
        assert told.kind == kind
        assert told.format == name or (kind, name) == ("mlp_speculator", "ibm"), told.reason
        assert_equal(found, read(tmp_path / name, told))
        if name == "vllm":  # it takes a null for a value
            written = json.loads((tmp_path / name / "config.json").read_text())
            assert None not in written.values(), written
        # Without Draftsmith's section, the target or the tensors supply what the format leaves out.
        record = json.loads((tmp_path / name / "config.json").read_text())
        del record["draftsmith"]
        (tmp_path / name / "config.json").write_text(json.dumps(record))
        known = {"layer_ids": found.config["layer_ids"], "rms_norm_eps": 1e-5}
        if "eagle" in kind:
            del known["rms_norm_eps"]
        assert FORMATS[name].read(tmp_path / name, kind, target=UNKNOWN_TARGET, known=known).config == found.config


def test_the_fifth_kind_needs_no_other_file() -> None:
    assert set(FORMATS["vllm"].layouts) == set(KINDS)


def test_bytes_are_the_librarys(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5), "a": torch.randn(4).bfloat16(), "c.d2t": torch.arange(3), "é": torch.ones(2, dtype=torch.bool),
        "h": torch.randn(2).half(), "i": torch.arange(3, dtype=torch.int32), "empty": torch.empty(0, 3),
        "f": torch.randn(2, dtype=torch.float64), "u": torch.arange(3, dtype=torch.uint8),
    }  # fmt: skip
    write_safetensors(tmp_path / "x.safetensors", in_memory(tensors))
    assert (tmp_path / "x.safetensors").read_bytes() == save(tensors, metadata={"format": "pt"})
    write_safetensors(tmp_path / "bare.safetensors", in_memory(tensors), metadata=None)
    assert (tmp_path / "bare.safetensors").read_bytes() == save(tensors)
    (tmp_path / "bare.safetensors").unlink()
    # The same if the bytes are copied from file to file.
    (tmp_path / "x.safetensors").rename(tmp_path / "model.safetensors")
    write_safetensors(tmp_path / "y.safetensors", open_weights(tmp_path))
    assert (tmp_path / "y.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("most", [70000.0, -1e30])
def test_weights_too_large_for_float16_are_refused(most: float, tmp_path: Path) -> None:
    """bfloat16 holds them; what was not finite before stays as it was."""
    large = Weight.of(torch.tensor([1.0, most]))
    with pytest.raises(UserError, match=r"too large for float16.*bfloat16"):
        write_safetensors(tmp_path / "model.safetensors", {"w": large.to(torch.float16)})
    assert list(tmp_path.iterdir()) == []
    assert large.to(torch.bfloat16).tensor().isfinite().all()
    infinite = torch.tensor([65504.0, float("inf"), float("-inf")])
    assert torch.equal(Weight.of(infinite).to(torch.float16).tensor(), infinite.half())


def test_pickles_and_shards(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(30, 4), "b": torch.randn(7).bfloat16(), "view": torch.randn(9, 8)[:, 2:5]}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    old = tmp_path / "old"
    old.mkdir()
    torch.save(tensors, old / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    save_file({"a": tensors["a"]}, sharded / "one.safetensors")
    save_file({"b": tensors["b"], "view": tensors["view"].contiguous()}, sharded / "two.safetensors")
    places = {"a": "one.safetensors", "b": "two.safetensors", "view": "two.safetensors"}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for folder in (tmp_path, old, sharded):
        found = open_weights(folder)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name].tensor(), tensors[name]) for name in tensors)


@given(st.integers(2, 60), st.data())
def test_maps_of_the_vocabulary_are_read_as_they_are_meant(vocabulary: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, vocabulary - 1))
    ids = torch.tensor(sorted(data.draw(st.permutations(range(vocabulary)))[:size]))
    made = {name: weight.tensor() for name, weight in to_tensors(ids, vocabulary=vocabulary).items()}
    mask = made["t2d"]
    shuffled = torch.tensor(data.draw(st.permutations(ids.tolist())))
    for given_ids in (made["d2t"], ids, shuffled, shuffled.int()):
        found, order = from_tensors({"d2t": given_ids, "t2d": mask}, vocabulary=vocabulary, size=size)
        assert torch.equal(found, ids)
        if order is not None:
            assert torch.equal(shuffled[order], ids)
    for one in ({"t2d": mask}, {"t2d": mask.to(torch.uint8)}):
        assert torch.equal(from_tensors(one, vocabulary=vocabulary, size=size)[0], ids)
    with suppress(UserError):  # it can be read both ways
        assert torch.equal(from_tensors({"d2t": made["d2t"]}, vocabulary=vocabulary, size=size)[0], ids)


UNSORTED = [
    ("eagle3", EAGLE3, "specforge", ["lm_head.weight"]),
    ("dspark", DSPARK, "vllm", ["lm_head.weight", "markov_head.markov_w2.weight"]),
    ("dspark", DSPARK, "speculators", ["lm_head.weight", "markov_head.markov_w2.weight"]),
]


@pytest.mark.parametrize(("kind", "config", "name", "by_token"), UNSORTED)
def test_rows_follow_the_vocabulary(
    kind: str, config: dict[str, Any], name: str, by_token: list[str], tmp_path: Path
) -> None:
    """An unsorted map reorders the rows of all tensors that have one for each draft token; one with too many rows stays damaged."""
    found = make_checkpoint(kind, config, torch.float32, 3)
    FORMATS[name].write(found, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    tensors["d2t"] = found.draft_token_ids[order]  # and as ids
    tensors |= {each: tensors[each][order] for each in by_token}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(found, read(tmp_path, recognize(tmp_path)))
    for each in by_token:
        longer = torch.cat([tensors[each], tensors[each][:1]])
        save_file(tensors | {each: longer}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=rf"{each} is \[8, "):
            read(tmp_path, recognize(tmp_path))


def test_another_vocabulary() -> None:
    """Cut and grown back, a drafter is unchanged; new tokens get the rows of the target's head."""
    found = make_checkpoint("eagle3", EAGLE3, torch.bfloat16, 3)
    old, head = found.draft_token_ids, found.weights["lm_head.weight"].tensor()
    cut = with_vocabulary(found, old[[1, 4, 6]], None)
    assert cut.config["draft_vocab_size"] == 3
    assert torch.equal(cut.weights["lm_head.weight"].tensor(), head[[1, 4, 6]])
    target_head = torch.randn(VOCAB, 16)
    grown = with_vocabulary(cut, torch.arange(VOCAB), target_head)
    expected = target_head.bfloat16()
    expected[old[[1, 4, 6]]] = head[[1, 4, 6]]
    assert torch.equal(grown.weights["lm_head.weight"].tensor(), expected)
    target_head[old] = head.float()
    assert_equal(with_vocabulary(cut, old, target_head), found)
    with pytest.raises(UserError, match="4 of the 7 tokens are not in the draft vocabulary yet"):
        with_vocabulary(cut, old, None)
    with pytest.raises(UserError, match="another target"):
        with_vocabulary(cut, old, target_head[:, :8])


def test_another_vocabulary_has_no_predictions() -> None:
    """Those were of the old one."""
    found = make_checkpoint("eagle3", EAGLE3, torch.float32, 3)
    lengths = {"1": 1.8, "3": 2.9}
    training = {
        "predicted_acceptance_length": lengths, "predicted_at_temperature": {"temperature": 1.0, "greedy_drafts": lengths},
        "predicted_speedup": lengths, "draft_vocabulary_coverage": 0.97,
    }  # fmt: skip
    found = replace(found, training=found.training | training)
    cut = with_vocabulary(found, found.draft_token_ids[:3], None)
    assert cut.training == {"steps": 3}
    assert "Predicted acceptance length" in render(found)
    assert "Predicted acceptance length" not in render(cut)


def test_another_vocabulary_s_store_is_of_the_same_target(tmp_path: Path) -> None:
    """By the config, or, where the drafter's target is unknown, by the tokens that its vocabulary has."""
    for name, target in (("known", TARGET), ("unknown", UNKNOWN_TARGET)):
        found = make_checkpoint("eagle3", EAGLE3 | {"draft_vocab_size": VOCAB}, torch.float32, 3)
        (tmp_path / name).mkdir()
        replace(found, target=dict(target)).save(tmp_path / name)

    def convert(drafter: str, tokens: list[int], **changes: str) -> list[int]:
        store = Path(tempfile.mkdtemp(dir=tmp_path))
        out = store.with_name(f"{store.name}-out")
        with StoreWriter(store, replace(IDENTITY, **changes), shard_tokens=100) as writer:
            ids, mask = torch.tensor(tokens, dtype=torch.int32), torch.ones(len(tokens), dtype=torch.bool)
            writer.append(Sequence(0, False, ids, mask, torch.ones(len(tokens), 2, 4)))
            writer.close()
        convert_checkpoint(tmp_path / drafter, out, to=NATIVE, vocabulary=2, store=store)
        return Checkpoint.load(out).draft_token_ids.tolist()

    assert convert("known", [5, 5, 9], target_config_hash=TARGET["config_hash"]) == [5, 9]
    assert convert("unknown", [5, 5, VOCAB - 1], target_config_hash="1" * 64) == [5, VOCAB - 1]
    with pytest.raises(UserError, match=r"of another target.*of tiny with the config 1111.*owner/target .*--store"):
        convert("known", [5, 5, 9], target_config_hash="1" * 64)
    with pytest.raises(UserError, match=rf"of another target.*tokens up to {VOCAB}, where .* {VOCAB} tokens"):
        convert("unknown", [5, 5, VOCAB], target_config_hash="1" * 64)


def test_another_vocabulary_of_a_markov_head() -> None:
    """Its rows follow their tokens as the head's do; new tokens get none."""
    found = make_checkpoint("dspark", DSPARK, torch.bfloat16, 3)
    name, old = "markov_head.markov_w2.weight", found.draft_token_ids
    rows, target_head = found.tensors[name], torch.randn(VOCAB, 16)
    cut = with_vocabulary(found, old[[1, 4, 6]], None)
    assert torch.equal(cut.tensors[name], rows[[1, 4, 6]])
    assert compare(found, cut)["relative_difference"] == 0
    grown = with_vocabulary(cut, torch.arange(VOCAB), target_head)
    expected = torch.zeros(VOCAB, 3).bfloat16()
    expected[old[[1, 4, 6]]] = rows[[1, 4, 6]]
    assert torch.equal(grown.tensors[name], expected)
    others = torch.tensor([token for token in range(VOCAB) if token not in old])[:7]  # as many, none of them the same
    assert not with_vocabulary(found, others, target_head).tensors[name].any()


def test_ropes_old_and_new(tmp_path: Path) -> None:
    found = make_checkpoint("eagle3", EAGLE3 | {"rope_parameters": ROPES[1]}, torch.float32, 3)
    for name in ("vllm", "specforge"):
        FORMATS[name].write(found, tmp_path)
        record = json.loads((tmp_path / "config.json").read_text())
        assert ("rope_parameters" in record) == (name == "vllm")
        assert ("rope_scaling" in record) == (name == "specforge")
        assert record.get("rope_theta", 500000.0) == 500000.0
        (tmp_path / "config.json").unlink()
    del record["rope_scaling"]["rope_type"]
    record["rope_scaling"]["type"] = "llama3"  # older still
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert read(tmp_path, recognize(tmp_path)).config["rope_parameters"] == ROPES[1]


@pytest.mark.parametrize("name", ["vllm", "specforge"])
def test_rope_in_both_spellings(name: str, tmp_path: Path) -> None:
    """transformers and vLLM take the older one then, and without its `rope_theta`, the one at the top level."""
    FORMATS[name].write(make_checkpoint("eagle3", EAGLE3, torch.float32, 3), tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())

    def rope(new: dict[str, Any], old: dict[str, Any], theta: float | None) -> dict[str, Any]:
        stated = {"rope_parameters": new, "rope_scaling": old, "rope_theta": theta}
        (tmp_path / "config.json").write_text(json.dumps(record | stated))
        found: dict[str, Any] = read(tmp_path, recognize(tmp_path)).config["rope_parameters"]
        return found

    scaling = {name: value for name, value in ROPES[1].items() if name not in ("rope_type", "rope_theta")}
    assert rope(ROPES[1], scaling | {"type": "llama3"}, 500000.0) == ROPES[1]
    assert rope(ROPES[1], {}, None) == ROPES[1]
    for new, theta in (({"rope_type": "default", "rope_theta": 500000.0}, 500000.0), (ROPES[1], None)):
        with pytest.raises(UserError, match=r"RoPE's settings twice.*`rope_scaling` \{.*take the latter"):
            rope(new, scaling | {"type": "llama3"}, theta)


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("older", "name", "settings"),
    [("mrope", "default", {"mrope_section": [1, 1, 2]}), ("su", "longrope", LONGROPE)],
)
def test_older_names_of_rope_types(older: str, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """As in SpecForge's config for Qwen2.5-VL."""
    FORMATS["specforge"].write(make_checkpoint("eagle3", EAGLE3, torch.float32, 3), tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    for key in ("type", "rope_type"):
        (tmp_path / "config.json").write_text(json.dumps(record | {"rope_scaling": {key: older, **settings}}))
        found = read(tmp_path, recognize(tmp_path)).config["rope_parameters"]
        assert found == {"rope_type": name, "rope_theta": 10000.0, **settings}


@pytest.mark.parametrize("scaling", [{"type": "spiral", "factor": 2.0}, {"rope_type": "mrope"}])
def test_an_unknown_type_of_rope_is_named(scaling: dict[str, Any], tmp_path: Path) -> None:
    FORMATS["specforge"].write(make_checkpoint("eagle3", EAGLE3, torch.float32, 3), tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record | {"rope_scaling": scaling}))
    with pytest.raises(UserError, match=r"type of RoPE is '(spiral|mrope)'; only default, linear, "):
        read(tmp_path, recognize(tmp_path))


@pytest.mark.parametrize("key", ["eagle_aux_hidden_state_layer_ids", "layer_ids"])
def test_layer_ids_of_the_config_come_before_the_target_s(key: str, tmp_path: Path) -> None:
    """Wherever vLLM looks for them; only without any, or with an empty list, those that are usual for the target are taken."""
    FORMATS["vllm"].write(make_checkpoint("eagle3", EAGLE3 | {"layer_ids": [1, 4, 6]}, torch.float32, 3), tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    known = {"layer_ids": (2, 5, 8)}

    def layer_ids(top: Any, section: Any, known: dict[str, Any] = known) -> list[int]:
        changes = {"eagle_aux_hidden_state_layer_ids": top, "eagle_config": {key: section}}
        kept = {name: value for name, value in (record | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        found = FORMATS["vllm"].read(tmp_path, "eagle3", target=UNKNOWN_TARGET, known=known)
        return list(found.config["layer_ids"])

    for absent in (None, []):
        assert layer_ids(absent, [1, 4, 6]) == layer_ids(absent, [1, 4, 6], {}) == [1, 4, 6]
        assert layer_ids([1, 4, 6], absent) == [1, 4, 6]
        assert layer_ids(absent, absent) == [2, 5, 8]
        with pytest.raises(UserError, match=r"does not say which of the target's states.*--target"):
            layer_ids(absent, absent, {})
    assert layer_ids([1, 4, 6], [2, 4, 6]) == [1, 4, 6]
    with pytest.raises(UserError, match=rf"`eagle_config\.{key}` is '7' in the config, where a list of whole numbers"):
        layer_ids(None, 7)


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle"])
def test_the_section_of_eagle_is_checked(kind: str, tmp_path: Path) -> None:
    """vLLM reads three of its fields; those of ModelOpt change nothing, and others might."""
    config = EAGLE3 | ({"num_depths": 5, "mask_token_id": 3} if kind == "p_eagle" else {})

    def norm_before_fc(stored: bool, section: Any, **top: Any) -> bool:
        found = make_checkpoint(kind, config | {"norm_before_fc": stored}, torch.float32, 3)
        FORMATS["vllm"].write(found, tmp_path)
        record = json.loads((tmp_path / "config.json").read_text())
        del record["norm_before_fc"]
        (tmp_path / "config.json").write_text(json.dumps(record | {"eagle_config": section} | top))
        again = FORMATS["vllm"].read(tmp_path, kind, target=UNKNOWN_TARGET, known={})
        return bool(again.config["norm_before_fc"])

    assert norm_before_fc(True, {"norm_before_fc": True})
    assert norm_before_fc(True, {"norm_before_fc": True}, norm_before_fc=False)
    assert norm_before_fc(True, {}, norm_before_fc=True)
    assert not norm_before_fc(False, None)
    of_modelopt = {
        "eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }  # fmt: skip
    assert not norm_before_fc(False, of_modelopt)
    with pytest.raises(UserError, match=r"`eagle_config\.use_aux_hidden_state` is 'False' in the config; only True"):
        norm_before_fc(False, {"use_aux_hidden_state": False})
    with pytest.raises(UserError, match=r"unknown fields.* eagle_config\.anything"):
        norm_before_fc(False, {"anything": 1})
    with pytest.raises(UserError, match=r"unknown fields.* eagle_config\."):
        norm_before_fc(False, [])


def test_the_first_token_may_be_the_mask() -> None:
    of_mask = [
        each
        for name in FORMATS
        for layout in FORMATS[name].layouts.values()
        for each in layout.fields
        if isinstance(each, Entry) and each.field == "mask_token_id"
    ]
    assert len(of_mask) >= 8
    for entry in of_mask:
        record: dict[str, Any] = {}
        entry.write(record, 0)
        assert entry.read(Source(record, {}), {}) == 0
        entry.write(record, -1)
        with pytest.raises(UserError, match=r"mask_token_id` is '-1' in the config, where a whole number from 0 on"):
            entry.read(Source(record, {}), {})


def test_an_empty_list_of_layers_says_nothing(tmp_path: Path) -> None:
    FORMATS["specforge"].write(make_checkpoint("eagle3", EAGLE3, torch.float32, 3), tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    record["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = []
    (tmp_path / "config.json").write_text(json.dumps(record))
    known = {"layer_ids": (2, 5, 8)}
    found = FORMATS["specforge"].read(tmp_path, "eagle3", target=UNKNOWN_TARGET, known=known)
    assert list(found.config["layer_ids"]) == [2, 5, 8]
    with pytest.raises(UserError, match=r"does not say which of the target's states.*--target"):
        read(tmp_path, recognize(tmp_path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("specforge", "eagle3"), ("vllm", "eagle3"), ("speculators", "eagle3"), ("eagle", "eagle"), ("vllm", "dspark")],
)
def test_a_sliding_window_that_is_turned_off(name: str, kind: str, tmp_path: Path) -> None:
    """As in all configs of Qwen2 and 2.5. Without the key that turns it off, such a window is one."""
    configs = {"eagle3": EAGLE3, "dspark": DSPARK}
    eagle = {name: value for name, value in DSPARK.items() if name in EAGLE3} | {
        "draft_vocab_size": VOCAB,
        "noise": 0.0,
    }
    found = make_checkpoint(kind, configs.get(kind, eagle | {"layer_ids": [5]}), torch.float32, 3)
    FORMATS[name].write(found, tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())

    def again(window: int, **used: bool) -> Checkpoint:
        layers = record["transformer_layer_config"] if name == "speculators" else record
        layers.pop("use_sliding_window", None)
        layers |= {"sliding_window": window, **used}
        (tmp_path / "config.json").write_text(json.dumps(record))
        return FORMATS[name].read(tmp_path, kind, target=UNKNOWN_TARGET, known={})

    assert_equal(again(131072, use_sliding_window=False), found)
    for used in ({}, {"use_sliding_window": True}):
        why = r"sliding_window` is .* in the config(; only (None|False) can be converted|, which does not say which layers)"
        with pytest.raises(UserError, match=why):
            again(131072, **used)


MEDUSA = {
    "layer_ids": [5], "hidden_size": 16, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "num_heads": 5,
    "num_layers": 1, "bias": True, "shared_head": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("stated", "layers", "said"),
    [
        ({"medusa_num_heads": 2, "medusa_num_layers": 1}, 1, "`medusa_num_heads: 2`, but its tensors are those of 5"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, 2, "`medusa_num_layers: 1`, but its tensors are those of 2"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, 1, ""),
        ({}, 2, ""),
    ],
)
def test_medusa_s_heads_and_layers_are_those_of_the_tensors(
    stated: dict[str, Any], layers: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The authors' own configs say 2 heads where the files have 5."""
    found = make_checkpoint("medusa", MEDUSA | {"num_layers": layers}, torch.float32, 3)
    (tmp_path / "theirs").mkdir()
    FORMATS["medusa"].write(found, tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(stated))
    known = {"layer_ids": [5], "rms_norm_eps": 1e-5}
    again = FORMATS["medusa"].read(tmp_path / "theirs", "medusa", target=UNKNOWN_TARGET, known=known)
    assert again.config == found.config
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("convert:") == bool(said)
    assert said in printed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda config, tensors: config.update(medusa_num_heads="many"), "`medusa_num_heads` is 'many'"),
        (lambda config, tensors: tensors.pop("3.0.linear.weight"), r"no tensors 4\.0\.linear\.bias"),
        (lambda config, tensors: tensors.pop("3.1.weight"), r"lacks 3\.1\.weight"),
        (lambda config, tensors: [tensors.pop(f"{head}.0.linear.weight") for head in range(5)], "has no heads"),
    ],
)
def test_a_damaged_medusa(change: Callable[[dict[str, Any], dict[str, Any]], Any], why: str, tmp_path: Path) -> None:
    FORMATS["medusa"].write(make_checkpoint("medusa", MEDUSA, torch.float32, 3), tmp_path)
    config, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, file)
    with pytest.raises(UserError, match=why):
        FORMATS["medusa"].read(tmp_path, "medusa", target=UNKNOWN_TARGET, known={})


SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "draft_vocab_size": 7, "eos_token_id": 2, "fc_norm": True, "head_dim": 8, "hidden_act": "silu", "hidden_size": 16,
    "initializer_range": 0.02, "intermediate_size": 12, "max_position_embeddings": 128, "max_window_layers": 48,
    "model_type": "llama", "norm_output": True, "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "float32", "transformers_version": "4.53.2", "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
"""As SpecForge's config of an EAGLE-3.1 drafter for Qwen3-30B-A3B, with these sizes."""


def test_a_specforge_drafter_with_the_norms_of_eagle_3_1(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    found = make_checkpoint("eagle3", EAGLE3 | {"fc_norm": True, "norm_output": True}, torch.float32, 3)
    FORMATS["specforge"].write(found, theirs)
    assert {f"fc_norm.{i}.weight" for i in range(3)} < load_file(theirs / "model.safetensors").keys()
    (theirs / "config.json").write_text(json.dumps(SPECFORGE))
    assert recognize(theirs).format == "specforge"
    again = FORMATS["specforge"].read(theirs, "eagle3", target=TARGET, known={"layer_ids": (2, 5, 8)})
    assert_equal(replace(again, training=found.training), found)
    FORMATS["vllm"].write(again, tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    assert (record["fc_norm"], record["norm_output"]) == (True, True)
    (theirs / "config.json").write_text(json.dumps(SPECFORGE | {"fc_norm": False}))
    with pytest.raises(UserError, match=r"has no tensors fc_norm\.0\.weight"):
        FORMATS["specforge"].read(theirs, "eagle3", target=TARGET, known={"layer_ids": (2, 5, 8)})


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_norms_there_and_back_through_specforge(fc_norm: bool, norm_output: bool, tmp_path: Path) -> None:
    """False is not written: SpecForge's own class once left out the head's norm where `norm_output` was false."""
    found = make_checkpoint("eagle3", EAGLE3 | {"fc_norm": fc_norm, "norm_output": norm_output}, torch.float32, 3)
    FORMATS["specforge"].write(found, tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    assert (record.get("fc_norm"), record.get("norm_output")) == (fc_norm or None, norm_output or None)
    assert_equal(read(tmp_path, recognize(tmp_path)), found)
    convert_checkpoint(tmp_path, tmp_path / "vllm", to="vllm")
    convert_checkpoint(tmp_path / "vllm", tmp_path / "back", to="specforge")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / file).read_bytes()


@pytest.mark.parametrize("change", [{"norm_before_residual": True}, {"norm_before_fc": True}, {"num_layers": 2}])
def test_what_specforge_cannot_express(change: dict[str, Any]) -> None:
    found = make_checkpoint("eagle3", EAGLE3 | change, torch.float32, 3)
    with pytest.raises(
        UserError, match=f"format specforge cannot hold this drafter: it cannot express `{next(iter(change))}"
    ):
        FORMATS["specforge"].to_files(found)


def test_tied_heads(tmp_path: Path) -> None:
    found = make_checkpoint("eagle3", EAGLE3 | {"draft_vocab_size": VOCAB}, torch.float32, 3, own_embedding=True)
    FORMATS["vllm"].write(found, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks lm_head\.weight.*nothing was made up"):
        read(tmp_path, recognize(tmp_path))
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record | {"tie_word_embeddings": True}))
    again = read(tmp_path, recognize(tmp_path))
    assert torch.equal(again.weights["lm_head.weight"].tensor(), found.weights[EMBEDDING].tensor())


def test_a_conversion_appears_whole(tmp_path: Path) -> None:
    found = make_checkpoint("eagle3", EAGLE3, torch.float32, 3)
    (tmp_path / "checkpoint").mkdir()
    found.save(tmp_path / "checkpoint")
    figures = convert_checkpoint(tmp_path / "checkpoint", tmp_path / "out", to="vllm", dtype="bfloat16")
    assert (figures["from"], figures["to"], figures["kind"]) == ("draftsmith", "vllm", "eagle3")
    again = read(tmp_path / "out", recognize(tmp_path / "out"))
    assert {weight.dtype for weight in again.weights.values()} == {torch.bfloat16}
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "out"}
    with pytest.raises(UserError, match="already exists"):
        convert_checkpoint(tmp_path / "checkpoint", tmp_path / "out", to="vllm")
    with pytest.raises(UserError, match="format ibm holds drafters of the kind mlp_speculator"):
        convert_checkpoint(tmp_path / "checkpoint", tmp_path / "other", to="ibm")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "out"}


@settings(deadline=None, max_examples=25)
@given(checkpoints())
def test_a_conversion_is_verified_by_what_it_computes(found: Checkpoint) -> None:
    small = {name: Weight.of(weight.tensor() * 0.2) for name, weight in found.weights.items()}  # as trained ones are
    found = replace(found, weights=small)
    assert compare(found, found) == {"relative_difference": 0, "same_first_choice": 1}
    rounded = compare(found, found.to("bfloat16"))
    assert rounded["relative_difference"] < 0.1
    name = sorted(
        name for name in found.weights if name.endswith("weight") and "embed" not in name and "emb." not in name
    )[-1]
    other = {**found.weights, name: Weight.of(found.weights[name].tensor() * -1)}
    with pytest.raises(DraftsmithError, match="computes something else than its source"):
        compare(found, replace(found, weights=other))


def test_the_command(tmp_path: Path) -> None:
    found = make_checkpoint("eagle3", EAGLE3, torch.float32, 3)
    (tmp_path / "checkpoint").mkdir()
    found.save(tmp_path / "checkpoint")
    source, out = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    listed = CliRunner().invoke(app, ["convert", "--list"])
    assert all(name in listed.output for name in FORMATS)
    done = CliRunner().invoke(app, ["convert", source, "--to", "specforge", "--out", out, "--verify", "--json"])
    assert done.exit_code == 0
    figures = json.loads(done.stdout)
    assert (figures["from"], figures["to"], figures["verified"]["relative_difference"]) == (
        "draftsmith",
        "specforge",
        0,
    )
    for arguments, message in {
        ("convert",): "Name a recipe",
        ("convert", source, "--to", "gguf", "--out", out): "`--to gguf` must be one of draftsmith, medusa, ",
        ("convert", source, "--to", "vllm"): "Name the folder to write with --out",
        (
            "convert",
            out,
            "--to",
            "vllm",
            "--out",
            out + "2",
            "--from",
            "draftsmith",
        ): "is not a checkpoint of the trainer",
        ("convert", source, "--out", out): "--out needs --to FORMAT",
        ("convert", source, "--to", "vllm", "--out", out): "already exists",
        ("convert", source, "--to", "vllm", "--out", out + "2", "--vocab", "5"): "--vocab and --store go together",
        (
            "convert",
            source,
            "--to",
            "vllm",
            "--out",
            out + "2",
            "--vocab",
            "99999",
            "--store",
            out,
        ): "--vocab 99999 is more than the target's vocabulary, which has",
        (
            "convert",
            source,
            "--to",
            "vllm",
            "--out",
            out + "/config.json/x",
        ): "config.json is a file. Name another folder",
        ("convert", str(tmp_path / "none"), "--to", "vllm", "--out", out + "2"): "There is no folder",
        ("convert", source, "--quantize", "int8"): "--quantize needs --to FORMAT",
        ("convert", source, "--verify"): "--verify needs --to FORMAT",
        (
            "convert",
            source,
            "--to",
            "vllm",
            "--out",
            out + "2",
            "--quantize",
            "int4",
        ): "`--quantize int4` must be one of int8, fp8",
    }.items():
        refused = CliRunner().invoke(app, arguments)
        assert isinstance(refused.exception, UserError)
        assert message in str(refused.exception)
    # A message says what was not compared.
    done = CliRunner().invoke(app, ["convert", source, "--to", "vllm", "--out", out + "3", "--verify"])
    assert done.exit_code == 0
    assert "without --target only logits are compared" in " ".join(done.stderr.split())


# ---- damaged and hostile files ----


class _Runs:
    """Unpickling it would create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.path}",))


def _header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _truncated(folder: Path, rng: random.Random) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: rng.randrange(len(data))])


def _huge_header(folder: Path, rng: random.Random) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", rng.choice([2**63, 2**64 - 1, 10**8, len(data)])) + data[8:]
    )


def _offsets(folder: Path, rng: random.Random) -> None:
    def change(header: dict[str, Any]) -> None:
        name = rng.choice([name for name in header if name != "__metadata__"])
        header[name]["data_offsets"][rng.randrange(2)] += rng.choice([-8, 8, 1 << 40, -(1 << 40)])

    _header(folder, change)


def _shape(folder: Path, rng: random.Random) -> None:
    def change(header: dict[str, Any]) -> None:
        name = rng.choice([name for name in header if name != "__metadata__"])
        header[name]["shape"] = rng.choice([[1 << 40], [-1, 4], ["a"], None, [0], [2**62, 4]])

    _header(folder, change)


def _of_other_shape(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = rng.choice(sorted(tensors))
    tensors[name] = torch.cat([tensors[name], tensors[name]]) if rng.random() < 0.5 else tensors[name][None]
    save_file(tensors, folder / "model.safetensors")


def _of_other_type(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = rng.choice(sorted(tensors))
    floating = tensors[name].is_floating_point()
    tensors[name] = tensors[name].to(rng.choice([torch.int64, torch.uint8]) if floating else torch.float32)
    save_file(tensors, folder / "model.safetensors")


def _swapped(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    one = rng.choice(sorted(tensors))
    other = rng.choice([name for name in sorted(tensors) if tensors[name].shape != tensors[one].shape])
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")


def _keys(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = rng.choice(sorted(set(tensors) - {"t2d"}))
    if rng.random() < 0.5:
        del tensors[name]
        if name == "d2t":
            del tensors["t2d"]
    else:
        tensors[rng.choice(["", "x", "layers.99.weight", "../x", "a" * 5000, "midlayer.extra"])] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")


def _maps(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = rng.choice([tensors["d2t"] - 1, tensors["d2t"] + VOCAB, torch.full((7,), -3), tensors["d2t"][:3]])
    save_file(tensors, folder / "model.safetensors")


def _config(folder: Path, rng: random.Random) -> None:
    record = json.loads((folder / "config.json").read_text())
    name = rng.choice(["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "head_dim", "draft_vocab_size",
                       "num_key_value_heads", "rms_norm_eps", "rope_theta", "num_hidden_layers"])  # fmt: skip
    record[name] = rng.choice(["x", -1, 0, [], {}, 1 << 70, True, [[1]], "\ud800", -1.5, float("nan")])
    if record[name] == 0 and name == "rms_norm_eps":
        record[name] = "0"  # else it would be right
    (folder / "config.json").write_text(json.dumps(record))


def _unknown(folder: Path, rng: random.Random) -> None:
    record = json.loads((folder / "config.json").read_text())
    name = rng.choice(["logit_scale", "mlp_bias", "quantization_config", "use_sliding_window", "residual_multiplier"])
    record[name] = rng.choice([True, 0.5, {"a": 1}])
    (folder / "config.json").write_text(json.dumps(record))


def _not_json(folder: Path, rng: random.Random) -> None:
    text = (folder / "config.json").read_bytes()
    bad = [
        b"",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff\xfe",
        text[: rng.randrange(1, len(text) - 2)],
        b'{"a": ' + b"9" * 5000 + b"}",
    ]
    (folder / "config.json").write_bytes(rng.choice(bad))


def _index(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    places: Any = dict.fromkeys(tensors, "one.safetensors")
    victim = rng.choice(sorted(places))
    bad = ["../one.safetensors", "/etc/passwd", "..", "", "missing.safetensors", "a/../one.safetensors", 7, None]
    choice = rng.randrange(len(bad) + 3)
    if choice < len(bad):
        places[victim] = bad[choice]
    elif choice == len(bad):
        del places[victim]
    elif choice == len(bad) + 1:
        places["phantom"] = "one.safetensors"
    else:
        places = [1, 2]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _pickled(folder: Path, rng: random.Random) -> None:
    tensors: Any = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file, marker = folder / "pytorch_model.bin", str(folder.parent / "ran")
    choice = rng.randrange(6)
    if choice == 0:
        torch.save(tensors | {"x": _Runs(marker)}, file)
    elif choice == 1:
        file.write_bytes(pickle.dumps(_Runs(marker)))
    elif choice == 2:
        torch.save(rng.choice([[1, 2], {"a": 1}, {1: torch.ones(2)}, torch.ones(3), None]), file)
    elif choice == 3:
        tensors["fc.weight"] = torch.ones(1).expand(16, 48)  # a claim without the bytes
        torch.save(tensors, file)
    elif choice == 4:
        torch.save(tensors, file)
        data = file.read_bytes()
        file.write_bytes(data[: rng.randrange(len(data) - 200)])
    else:
        file.write_bytes(rng.randbytes(rng.randrange(200)))


def _own_section(folder: Path, rng: random.Random) -> None:
    """Junk in Draftsmith's section of the config."""
    record = json.loads((folder / "config.json").read_text())
    junk = rng.choice([5, [1], {"a": 1}, True])
    if rng.random() < 0.5:
        record["draftsmith"]["target"][rng.choice(["name", "revision", "config_hash"])] = junk
    else:
        record["draftsmith"]["training"] = {"predicted_acceptance_length": rng.choice([5, [1], {"1": "x"}, {"1": [2]}])}
    (folder / "config.json").write_text(json.dumps(record))


def _headless(folder: Path, rng: random.Random) -> None:
    """An unsorted map without a head whose rows could be reordered."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    ids = tensors["d2t"] + torch.arange(7)
    tensors["d2t"] = ids.flip(0) if rng.random() < 0.5 else ids.roll(rng.randrange(1, 7))
    save_file(tensors, folder / "model.safetensors")


DAMAGES = [
    _truncated, _huge_header, _offsets, _shape, _of_other_shape, _of_other_type, _swapped, _keys, _maps, _config, _unknown,
    _not_json, _index, _pickled, _own_section, _headless,
]  # fmt: skip
CASES = 1024


def test_damaged_and_hostile_inputs(tmp_path: Path) -> None:
    """Each is a clear error, runs no code and leaves no files."""
    good = tmp_path / "good"
    good.mkdir()
    FORMATS["specforge"].write(make_checkpoint("eagle3", EAGLE3, torch.float32, 3), good)
    assert read(good, recognize(good)).kind == "eagle3"
    for case in range(CASES):
        rng = random.Random(case)
        damage = DAMAGES[case % len(DAMAGES)]
        folder = tmp_path / "bad"
        shutil.copytree(good, folder)
        damage(folder, rng)
        message = ""
        try:
            convert_checkpoint(folder, tmp_path / "out", to="vllm")
        except DraftsmithError as error:
            message = str(error)
        assert str(folder) in message, (case, damage.__name__, message)
        assert len(message) < 1500
        assert "\n\n" not in message
        assert {path.name for path in tmp_path.iterdir()} == {"good", "bad"}, (case, damage.__name__)
        shutil.rmtree(folder)
