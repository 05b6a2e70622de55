"""Formats of P-EAGLE, DFlash and DSpark: published configs, what is left to the target, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.cli.plan_training import trained_parameters
from draftsmith.cli.published import for_serving
from draftsmith.config.methods import TrainedDrafter
from draftsmith.convert.convert import convert_checkpoint, leaves_tensors_out, read, recognize, window_as_trained
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters.checkpoint import EMBEDDING, Checkpoint
from draftsmith.engine import environment
from draftsmith.engine.speculation import check_target, longest_draft, method_config, speculative_config
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.weights import Weight
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.tensors import TargetTensors, load_target_tensors
from draftsmith.train.train import run_train
from tests.unit.test_formats import assert_equal
from tests.unit.test_published import make_checkpoint, recipe_for
from tests.unit.tiny_run import HIDDEN, LAYERS, VOCAB, make_recipe, make_run

LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 24, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 128, "vocab_size": VOCAB, "layer_ids": [1, 2, 3],
}  # fmt: skip
BLOCK: dict[str, Any] = LAYER | {"block_size": 5, "mask_token_id": 7, "causal": False, "draft_vocab_size": VOCAB}
CONFIGS: dict[str, dict[str, Any]] = {
    "p_eagle": LAYER | {
        "draft_vocab_size": 20, "norm_before_residual": False, "fc_norm": True, "norm_output": False, "num_depths": 4, "mask_token_id": 7},
    "dflash": BLOCK,
    "dspark": BLOCK | {
        "markov_rank": 3, "sample_from_anchor": True, "enable_confidence_head": True, "confidence_head_with_markov": True},
}  # fmt: skip

# Configs as published, with sizes of this target.
LAYERS_OF_QWEN3: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu",
    "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": 24, "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 128, "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
ZLAB = LAYERS_OF_QWEN3 | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 5, "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 2]}, "num_target_layers": LAYERS, "transformers_version": "4.57.3",
}  # fmt: skip
DEEPSPEC = LAYERS_OF_QWEN3 | {
    "architectures": ["Qwen3DSparkModel"], "block_size": 5, "num_target_layers": LAYERS, "mask_token_id": 7, "target_layer_ids": [0, 1, 2],
    "num_anchors": 512, "enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 3,
    "markov_head_type": "vanilla",
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "aux_hidden_state_layer_ids": [1, 2, 3], "block_size": 5, "draft_vocab_size": VOCAB,
    "dtype": "float32", "has_no_defaults_at_init": False, "mask_token_id": 7, "sample_from_anchor": False,
    "sliding_window_non_causal": False, "speculators_model_type": "dflash", "speculators_version": "0.9.0", "target_hidden_size": None,
    "tie_word_embeddings": True, "transformer_layer_config": LAYERS_OF_QWEN3, "transformers_version": "5.12.0",
    "speculators_config": {
        "algorithm": "dflash", "default_proposal_method": "greedy",
        "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "owner/target"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    make_run(folder := tmp_path_factory.mktemp("run"))
    return describe_target(folder / "target")


@pytest.fixture(scope="module")
def tensors(target: TargetInfo) -> TargetTensors:
    return load_target_tensors(target.path)


def sharing(kind: str, tensors: TargetTensors, **fields: Any) -> Checkpoint:
    """A drafter whose head, and whose mask, are the target's, as their authors train it."""
    found = make_checkpoint(kind, CONFIGS[kind] | fields)
    weights = {**found.weights, "lm_head.weight": Weight.of(tensors.lm_head)}
    if "mask_embedding" in weights:
        weights["mask_embedding"] = Weight.of(tensors.embedding[found.config["mask_token_id"]])
    return replace(found, weights=weights)


def own_files(folder: Path, record: dict[str, Any], checkpoint: Checkpoint, *left_out: str) -> Path:
    """A folder as others write it, with the tensors of `checkpoint`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(record))
    kept = {name: value for name, value in checkpoint.tensors.items() if name not in left_out}
    save_file(kept, folder / "model.safetensors")
    return folder


# ---- published configs ----


@pytest.mark.parametrize(("record", "name"), [(ZLAB, "zlab"), (SPECULATORS, "speculators")])
def test_a_published_dflash(
    record: dict[str, Any], name: str, target: TargetInfo, tensors: TargetTensors, tmp_path: Path
) -> None:
    expected = sharing("dflash", tensors)
    folder = own_files(tmp_path / "theirs", record, expected, "lm_head.weight", "mask_embedding")
    found = recognize(folder)
    assert (found.format, found.kind) == (name, "dflash")
    assert leaves_tensors_out(folder, "vllm")
    with pytest.raises(UserError, match=r"leaves `mask_embedding` to the target.*--target"):
        read(folder, found)
    checkpoint = read(folder, found, target)
    assert checkpoint.config == expected.config
    for each, value in expected.tensors.items():
        assert torch.equal(checkpoint.tensors[each], value), each
    # And back: what the target has is left out again.
    FORMATS[name].write(checkpoint, tmp_path, shared=lambda: tensors)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert_equal(checkpoint, read(tmp_path, recognize(tmp_path), target))


@pytest.mark.parametrize("record", [ZLAB, SPECULATORS])
def test_a_mask_in_a_file_of_its_own(
    record: dict[str, Any], target: TargetInfo, tensors: TargetTensors, tmp_path: Path
) -> None:
    """vLLM takes it from there whatever the format is, and not from the target."""
    made = replace(sharing("dflash", tensors), target={"name": None, "revision": None, "config_hash": None})
    folder = own_files(tmp_path / "theirs", record, made, "lm_head.weight", "mask_embedding")
    mask, file = torch.randn(HIDDEN), folder / "mask_embedding.pt"
    for content in ({"embedding": mask, "mask_token_id": 7}, {"embedding": mask[None, None]}, mask):
        torch.save(content, file)
        assert torch.equal(read(folder, recognize(folder), target).tensors["mask_embedding"], mask)
    convert_checkpoint(folder, tmp_path / "vllm", to="vllm", target=target, verify=True)
    assert torch.equal(torch.load(tmp_path / "vllm" / "mask_embedding.pt", weights_only=True)["embedding"], mask)
    with pytest.raises(UserError, match=r"`mask_embedding` from the target's embedding.*differs"):
        convert_checkpoint(folder, tmp_path / "zlab", to="zlab", target=target)
    for content, why in (
        ({"embedding": mask, "mask_token_id": 8}, "is for the mask token 8, and the config says 7"),
        ({"embedding": mask[1:]}, rf"{HIDDEN} floating-point numbers, and holds torch.float32 \[{HIDDEN - 1}\]"),
        ({"mask_token_id": 7}, "holds NoneType"),
        (mask.long(), "holds torch.int64"),
        (mask.to_sparse(), "numbers, and holds"),
        (Path("code"), "cannot be read"),
    ):
        torch.save(content, file)
        with pytest.raises(UserError, match=rf"theirs.*mask_embedding\.pt.*{why}"):
            read(folder, recognize(folder), target)
    file.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"mask_embedding\.pt cannot be read.*Get it again"):
        read(folder, recognize(folder), target)


def test_dspark_has_no_such_file(tensors: TargetTensors, tmp_path: Path) -> None:
    made = sharing("dspark", tensors)
    made = replace(made, weights={**made.weights, EMBEDDING: Weight.of(tensors.embedding)})
    folder = own_files(tmp_path / "theirs", DEEPSPEC, made)
    (folder / "mask_embedding.pt").write_bytes(b"passed over, as in vLLM")
    assert "mask_embedding" not in read(folder, recognize(folder)).weights


def test_the_usual_layers(tensors: TargetTensors, tmp_path: Path, target: TargetInfo) -> None:
    """Of 36 layers, five feed Qwen3-8B's published drafter: outputs 1, 9, 17, 25 and 33. Of 16, a drafter of one layer reads the eighth."""
    for layers, depth, expected in ((5, 36, [2, 10, 18, 26, 34]), (1, 16, [9])):
        made = sharing("dflash", tensors, num_layers=layers, layer_ids=expected)
        about = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "num_target_layers": depth}
        record = ZLAB | about | {"dflash_config": {"mask_token_id": 7}}
        folder = own_files(tmp_path / str(layers), record, made, "lm_head.weight", "mask_embedding")
        assert read(folder, recognize(folder), target).config["layer_ids"] == expected
    (folder / "config.json").write_text(
        json.dumps({name: v for name, v in record.items() if name != "num_target_layers"})
    )
    with pytest.raises(UserError, match=r"which of the target's states the drafter reads"):
        read(folder, recognize(folder), target)


def test_a_published_dspark(tensors: TargetTensors, tmp_path: Path) -> None:
    """DeepSpec's, which predict from the anchor's row without a key that says so."""
    made = sharing("dspark", tensors)
    made = replace(made, weights={**made.weights, EMBEDDING: Weight.of(tensors.embedding)})
    folder = own_files(tmp_path / "theirs", DEEPSPEC, made)
    found = recognize(folder)
    assert (found.format, found.kind) == ("deepspec", "dspark")
    checkpoint = read(folder, found)
    assert checkpoint.config == made.config
    assert_equal(replace(checkpoint, target=made.target, training=made.training), made)
    # And back: the same files.
    (tmp_path / "ours").mkdir()
    FORMATS["deepspec"].write(checkpoint, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    said = DEEPSPEC.keys() - LAYERS_OF_QWEN3.keys() - {"num_target_layers"}  # which training alone reads
    assert {name: written[name] for name in said} == {name: DEEPSPEC[name] for name in said}
    theirs = load_file(folder / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.items())
    assert_equal(checkpoint, read(tmp_path / "ours", recognize(tmp_path / "ours")))


def test_a_dspark_of_ours_for_deepspec(tensors: TargetTensors, tmp_path: Path) -> None:
    """It gets the target's embedding, which is left out again; what DeepSpec's class does not compute is refused."""
    made = make_checkpoint("dspark", CONFIGS["dspark"])
    with pytest.raises(UserError, match=r"hold an embedding, and the drafter has none of its own.*--target"):
        FORMATS["deepspec"].to_files(made)
    FORMATS["deepspec"].write(made, tmp_path, shared=lambda: tensors)
    assert torch.equal(load_file(tmp_path / "model.safetensors")[EMBEDDING], tensors.embedding)
    assert_equal(made, read(tmp_path, recognize(tmp_path)))
    for changes, why in (
        ({"sample_from_anchor": False}, "cannot express `sample_from_anchor: False`"),
        ({"causal": True}, "cannot express `causal: True`"),
        ({"draft_vocab_size": 20}, "draft from the target's whole vocabulary"),
    ):
        with pytest.raises(UserError, match=why):
            FORMATS["deepspec"].to_files(make_checkpoint("dspark", CONFIGS["dspark"] | changes), shared=lambda: tensors)


# ---- both ways ----


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("draft_vocab_size", [20, VOCAB])
def test_there_and_back_through_speculators(
    kind: str, draft_vocab_size: int, target: TargetInfo, tensors: TargetTensors, tmp_path: Path
) -> None:
    made = make_checkpoint(kind, CONFIGS[kind] | {"draft_vocab_size": draft_vocab_size})
    made = replace(made, target={"name": "owner/target", "revision": None, "config_hash": None}, training={"steps": 3})
    FORMATS["speculators"].write(made, tmp_path, shared=lambda: tensors)
    told = recognize(tmp_path)
    assert (told.format, told.kind) == ("speculators", kind)
    assert_equal(made, read(tmp_path, told))
    record = json.loads((tmp_path / "config.json").read_text())
    (method,) = record["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == (5 if kind == "dspark" else 4)
    # Where their class would read the target's tensors instead of the drafter's, the target is not named.
    own = kind == "dflash" or (kind == "dspark" and draft_vocab_size == VOCAB)
    assert record["speculators_config"]["verifier"]["name_or_path"] == (None if own else "owner/target")


def test_the_mask_becomes_a_row(tensors: TargetTensors, tmp_path: Path) -> None:
    made = make_checkpoint("dflash", BLOCK, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"no place for the drafter's `mask_embedding`.*--target"):
        FORMATS["speculators"].to_files(made)
    FORMATS["speculators"].write(made, tmp_path, shared=lambda: tensors)
    table, mask = load_file(tmp_path / "model.safetensors")[EMBEDDING], made.tensors["mask_embedding"]
    assert torch.equal(table[7], mask.float())
    expected = tensors.embedding.clone()
    expected[7] = mask.float()
    assert torch.equal(table, expected)
    # An embedding of the drafter's own takes it too, and stays.
    other = replace(made, weights={**made.weights, EMBEDDING: Weight.of(expected.flip(0).bfloat16())})
    FORMATS["speculators"].write(other, tmp_path)
    again = read(tmp_path, recognize(tmp_path))
    assert torch.equal(again.tensors["mask_embedding"], mask)
    assert torch.equal(again.tensors[EMBEDDING][:7], other.tensors[EMBEDDING][:7])


def test_zlab_holds_what_the_target_has(tensors: TargetTensors, target: TargetInfo, tmp_path: Path) -> None:
    made = sharing("dflash", tensors)
    FORMATS["zlab"].write(made, tmp_path, shared=lambda: tensors)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [0, 1, 2], "causal": False}
    assert (written["rope_theta"], written["layer_types"]) == (10000.0, ["full_attention"] * 2)
    for change, why in (
        ({"lm_head.weight": Weight.of(-tensors.lm_head)}, r"`lm_head.weight` from the target's lm_head.*differs"),
        (
            {"mask_embedding": Weight.of(-tensors.embedding[7])},
            r"`mask_embedding` from the target's embedding.*differs.*`train.drafter.train_mask_embedding: false`",
        ),
        ({EMBEDDING: Weight.of(tensors.embedding)}, "an embedding of its own"),
    ):
        with pytest.raises(UserError, match=why):
            FORMATS["zlab"].to_files(replace(made, weights={**made.weights, **change}), shared=lambda: tensors)
    with pytest.raises(UserError, match=r"is not known to be the same.*--target"):
        FORMATS["zlab"].to_files(made)
    reduced = make_checkpoint("dflash", BLOCK | {"draft_vocab_size": 20})
    reduced = replace(reduced, weights={**reduced.weights, "mask_embedding": made.weights["mask_embedding"]})
    with pytest.raises(
        UserError, match=r"`lm_head.weight` from the target's lm_head.*`train.drafter.draft_vocab_size: null`"
    ):
        FORMATS["zlab"].to_files(reduced, shared=lambda: tensors)


def test_a_dflash_of_ours_for_zlab(tmp_path: Path) -> None:
    """Trained with the target's mask and head, which its authors' format leaves to the target."""
    options = {"kind": "dflash", "block_size": 4, "draft_vocab_size": None, "mask_token_id": 7}
    run_dir = make_run(tmp_path)
    figures = {}
    for trains in (True, False):
        recipe = make_recipe(tmp_path, drafter={**options, "train_mask_embedding": trains}, epochs=0.5, ema=0.9)
        figures[trains] = run_train(recipe, run_dir)
    made, target = Checkpoint.load(run_dir / "checkpoint"), describe_target(tmp_path / "target")
    tensors = load_target_tensors(target.path)
    assert torch.equal(made.tensors["mask_embedding"], tensors.embedding[7].float())
    assert figures[True]["parameters_trained"] - figures[False]["parameters_trained"] == HIDDEN
    assert trained_parameters(recipe, made.drafter(tensors))[0] == figures[False]["parameters_trained"]
    FORMATS["zlab"].write(made, tmp_path, shared=lambda: tensors)
    assert load_file(tmp_path / "model.safetensors").keys().isdisjoint({"mask_embedding", "lm_head.weight"})
    found = recognize(tmp_path)
    assert (found.format, found.kind) == ("zlab", "dflash")
    assert_equal(made, read(tmp_path, found, target))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_causal_block_is_refused(kind: str, tensors: TargetTensors) -> None:
    """Speculators' full attention sees the whole block: written without a word, the drafter would compute something else."""
    made = sharing(kind, tensors, causal=True)
    for name in ("speculators", *(["zlab"] if kind == "dflash" else [])):
        with pytest.raises(UserError, match="cannot express `causal: True`"):
            FORMATS[name].to_files(made, shared=lambda: tensors)


def test_the_command_verifies_it(target: TargetInfo, tensors: TargetTensors, tmp_path: Path) -> None:
    made = make_checkpoint("dflash", BLOCK)
    (tmp_path / "checkpoint").mkdir()
    made.save(tmp_path / "checkpoint")
    figures = convert_checkpoint(
        tmp_path / "checkpoint", tmp_path / "theirs", to="speculators", target=target, verify=True
    )
    assert figures["verified"]["relative_difference"] == 0
    figures = convert_checkpoint(tmp_path / "theirs", tmp_path / "back", to="draftsmith", target=target, verify=True)
    assert (figures["from"], figures["verified"]["relative_difference"]) == ("speculators", 0)
    assert torch.equal(Checkpoint.load(tmp_path / "back").tensors["mask_embedding"], made.tensors["mask_embedding"])


@pytest.mark.parametrize("named", [True, False])
def test_an_embedding_that_is_missing_is_said(
    named: bool, target: TargetInfo, tensors: TargetTensors, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Speculators' classes need the target's in P-EAGLE's file; the drafter still has none of its own."""
    made = make_checkpoint("p_eagle", CONFIGS["p_eagle"])
    (tmp_path / "checkpoint").mkdir()
    made.save(tmp_path / "checkpoint")
    convert_checkpoint(tmp_path / "checkpoint", tmp_path / "theirs", to="speculators", target=target if named else None)
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    assert (EMBEDDING in stored) is named
    assert not named or torch.equal(stored[EMBEDDING], tensors.embedding.float())
    assert ("has no embedding" in " ".join(capsys.readouterr().err.split())) is not named
    assert EMBEDDING not in read(tmp_path / "theirs", recognize(tmp_path / "theirs")).weights


# ---- sliding windows ----


def _of_windows(**fields: Any) -> dict[str, Any]:
    """As speculators' trainer writes DFlash by default, but for some fields of the layers."""
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048, "use_sliding_window": True}
    return SPECULATORS | {"transformer_layer_config": LAYERS_OF_QWEN3 | windows | fields}


@pytest.mark.parametrize(("bidirectional", "causal"), [(False, True), (None, True), (True, False)])
def test_a_dflash_of_speculators_trainer(
    bidirectional: bool | None,
    causal: bool,
    target: TargetInfo,
    tensors: TargetTensors,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default all of its layers have a window, within which rows see no later ones of their block."""
    record = _of_windows() | {"sliding_window_non_causal": bidirectional}
    made = sharing("dflash", tensors)
    folder = own_files(tmp_path / "theirs", record, made, "lm_head.weight", "mask_embedding")
    expected = made.config | {"sliding_window": 2048, "causal": causal}
    assert read(folder, recognize(folder), target).config == expected
    convert_checkpoint(folder, tmp_path / "vllm", to="vllm", target=target, verify=True)
    assert "the last 2048 tokens of the context" in " ".join(capsys.readouterr().err.split())
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())
    # Without `use_sliding_window`, transformers' config of Qwen3, which vLLM reads, drops the window.
    assert (written["sliding_window"], written["use_sliding_window"]) == (2048, True)
    assert (written["layer_types"], written["dflash_config"]["causal"]) == (["sliding_attention"] * 2, causal)
    convert_checkpoint(tmp_path / "vllm", tmp_path / "back", to="speculators", target=target)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["sliding_window_non_causal"] is not causal
    assert (
        written["transformer_layer_config"].items()
        >= {
            name: record["transformer_layer_config"][name]
            for name in ("layer_types", "sliding_window", "use_sliding_window")
        }.items()
    )
    for other in ("zlab", "speculators"):  # without a window, causal layers are not what speculators' classes compute
        changed = replace(made, config=expected | ({} if other == "zlab" else {"causal": True, "sliding_window": None}))
        with pytest.raises(UserError, match=r"it cannot express `(sliding_window: 2048|causal: True)"):
            FORMATS[other].to_files(changed, shared=lambda: tensors)


def test_vllm_s_own_default_of_a_window_s_direction(tensors: TargetTensors, tmp_path: Path) -> None:
    for window in (None, 16):
        made = make_checkpoint("dflash", CONFIGS["dflash"] | {"sliding_window": window})
        (folder := tmp_path / str(window)).mkdir()
        FORMATS["vllm"].write(made, folder)
        record = json.loads((folder / "config.json").read_text())
        del record["dflash_config"]["causal"]
        (folder / "config.json").write_text(json.dumps(record))
        assert read(folder, recognize(folder)).config["causal"] is (window is not None)


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle"])
def test_qwen3_s_layers_have_a_class_of_their_own_in_vllm(kind: str, tmp_path: Path) -> None:
    """speculators' trainer gives P-EAGLE such layers by default, with a window that vLLM counts as it does."""
    config = CONFIGS["p_eagle"] | {"qk_norm": True, "sliding_window": 2048}
    if kind == "eagle3":
        config = {name: value for name, value in config.items() if name not in ("num_depths", "mask_token_id")}
    (tmp_path / "theirs").mkdir()
    FORMATS["speculators"].write(make_checkpoint(kind, config), tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())["transformer_layer_config"]
    assert (theirs["model_type"], theirs["layer_types"]) == (
        "qwen3",
        ["sliding_attention"] * theirs["num_hidden_layers"],
    )
    convert_checkpoint(tmp_path / "theirs", tmp_path / "vllm", to="vllm", verify=True)
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert (written["architectures"], written["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")
    assert recognize(tmp_path / "vllm").kind == kind
    assert speculative_config(tmp_path / "vllm", 2).get("parallel_drafting", False) is (kind == "p_eagle")
    assert window_as_trained(kind) is (kind == "p_eagle")


# ---- what is refused ----


def _of_dspark(**fields: Any) -> dict[str, Any]:
    plain = {
        "sample_from_anchor": True, "enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 3,
        "markov_head_type": "vanilla",
    }  # fmt: skip
    record = SPECULATORS | {"speculators_model_type": "dspark"} | plain | fields
    return {name: value for name, value in record.items() if value is not None}


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (_of_dspark(markov_head_type="gated"), "markov_head_type: gated"),
        (_of_dspark(markov_rank=0), "no Markov head .*draft from the last known token's row"),
        (SPECULATORS | {"sample_from_anchor": True}, "row of the last known token"),
        (
            SPECULATORS | {"transformer_layer_config": LAYERS_OF_QWEN3 | {"layer_types": ["sliding_attention"] * 2}},
            "does not say how long it is",
        ),
        (
            _of_windows(layer_types=["full_attention", "sliding_attention"]),
            "whose layers all have a sliding window, or none",
        ),
        (_of_windows(layer_types=["sliding_attention"]), "for 2 layers"),
        (
            _of_windows(layer_types=["sliding_attention", "chunked_attention"]),
            "only full_attention and sliding_attention",
        ),
        (_of_windows(layer_types=None), "does not say which layers"),
        (_of_windows(use_sliding_window=False), "does not say how long it is"),
        (_of_windows() | {"sliding_window_non_causal": 1}, "sliding_window_non_causal` is '?1"),
        (SPECULATORS | {"mask_token_id": None}, "mask_token_id"),
        (SPECULATORS | {"mask_token_id": VOCAB}, "too few"),
        (ZLAB | {"layer_types": ["full_attention", "sliding_attention"]}, "only layers with full attention"),
        (
            ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"sample_from_anchor": True}},
            r"`dflash_config.sample_from_anchor: True`",
        ),
        (ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"use_swa": True}}, "unknown fields.*dflash_config.use_swa"),
    ],
)
def test_what_is_not_implemented(
    record: dict[str, Any], why: str, target: TargetInfo, tensors: TargetTensors, tmp_path: Path
) -> None:
    kind = "dspark" if record.get("speculators_model_type") == "dspark" else "dflash"
    folder = own_files(tmp_path / "theirs", record, sharing(kind, tensors), "lm_head.weight", "mask_embedding")
    with pytest.raises(UserError, match=why) as refused:
        convert_checkpoint(folder, tmp_path / "out", to="vllm", target=target)
    assert str(folder) in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_confidence_head_is_not_dropped(target: TargetInfo, tensors: TargetTensors, tmp_path: Path) -> None:
    made = sharing("dspark", tensors)
    keys = ("enable_confidence_head", "confidence_head_with_markov")
    for number, record in enumerate([_of_dspark(), _of_dspark(**dict.fromkeys(keys))]):  # by default both are true
        folder = own_files(tmp_path / str(number), record, made, "lm_head.weight")
        checkpoint = read(folder, recognize(folder), target)
        assert checkpoint.config == made.config
        assert torch.equal(
            checkpoint.tensors["confidence_head.proj.weight"], made.tensors["confidence_head.proj.weight"]
        )
    (folder / "config.json").write_text(json.dumps(_of_dspark(enable_confidence_head=False)))
    with pytest.raises(UserError, match="confidence_head"):
        read(folder, recognize(folder), target)


def _proposing(record: dict[str, Any], tokens: int) -> dict[str, Any]:
    section = SPECULATORS["speculators_config"] | {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    }
    return record | {"speculators_config": section}


@pytest.mark.parametrize(("proposed", "all_rows"), [(5, True), (4, False), (3, False)])
def test_a_dspark_of_speculators_from_before_the_key(
    proposed: int, all_rows: bool, target: TargetInfo, tensors: TargetTensors, tmp_path: Path
) -> None:
    """Its anchor's row drafted nothing, as vLLM takes it. The key's default in speculators became true later."""
    made = sharing("dspark", tensors)
    record = _proposing(_of_dspark(sample_from_anchor=None, max_anchors=512), proposed)
    folder = own_files(tmp_path / "theirs", record, made, "lm_head.weight")
    assert read(folder, recognize(folder), target).config["sample_from_anchor"] is all_rows
    convert_checkpoint(folder, tmp_path / "vllm", to="vllm", target=target)
    assert longest_draft(tmp_path / "vllm") == (5 if all_rows else 4)


def test_what_speculators_wrote_before_0_7(target: TargetInfo, tensors: TargetTensors, tmp_path: Path) -> None:
    """How a drafter was trained was in its config: of DFlash `max_anchors`, of P-EAGLE three keys, one of which decides K."""
    made = sharing("dflash", tensors)
    folder = own_files(
        tmp_path / "dflash", SPECULATORS | {"max_anchors": 256}, made, "lm_head.weight", "mask_embedding"
    )
    assert read(folder, recognize(folder), target).config == made.config
    (folder := tmp_path / "p_eagle").mkdir()
    FORMATS["speculators"].write(made := make_checkpoint("p_eagle", CONFIGS["p_eagle"]), folder)
    record = json.loads((folder / "config.json").read_text())
    older = {"num_depths": 4, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
    (folder / "config.json").write_text(json.dumps(_proposing(record, 2) | older))
    assert read(folder, recognize(folder)).config == made.config
    (folder / "config.json").write_text(json.dumps(record | older | {"num_depths": "4"}))
    with pytest.raises(UserError, match="`num_depths` is '4'"):
        read(folder, recognize(folder))


def test_a_block_s_size_in_the_section(target: TargetInfo, tensors: TargetTensors, tmp_path: Path) -> None:
    """z-lab's files for Qwen3.5 and later."""
    made = sharing("dflash", tensors)
    record = ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"block_size": 5}}
    del record["block_size"]
    folder = own_files(tmp_path / "theirs", record, made, "lm_head.weight", "mask_embedding")
    assert read(folder, recognize(folder), target).config == made.config
    assert longest_draft(folder) == 4
    with pytest.raises(UserError, match="at most 4 tokens, and 5 were requested"):
        speculative_config(folder, 5)


def test_the_card_says_where_vllm_serves_a_form(target: TargetInfo, tensors: TargetTensors, tmp_path: Path) -> None:
    for kind, form, said in (
        ("dspark", "vllm", 'whose plugin serves it as `"method": "dflash"`'),
        ("dspark", "speculators", "On a CPU, vLLM 0.32 does not serve it in this form"),
        ("dspark", "deepspec", "On a CPU, vLLM 0.32 does not serve it in this form"),
        ("p_eagle", "speculators", "passes over `fc_norm`"),
        ("p_eagle", "vllm", ""),
    ):
        source = tmp_path / f"{kind}-{form}"
        source.mkdir()
        FORMATS["vllm"].write(make_checkpoint(kind, CONFIGS[kind]), source)
        convert_checkpoint(source, tmp_path / f"{kind}-to-{form}", to=form, target=target)
        card = (tmp_path / f"{kind}-to-{form}" / "README.md").read_text()
        assert said in card
        assert ("--to vllm" in card) is (form != "vllm")


Damage = Callable[[dict[str, Any], random.Random], None]
JUNK = ["x", -1, [], {}, 1 << 70, [[1]], -1.5, float("nan"), None, "\ud800"]


def _field(record: dict[str, Any], rng: random.Random) -> None:
    """Junk in a field that every such config has."""
    path = rng.choice([
        "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size", "transformer_layer_config.hidden_size",
        "transformer_layer_config.vocab_size", "transformer_layer_config.num_hidden_layers",
    ])  # fmt: skip
    *sections, last = path.split(".")
    for section in sections:
        record = record[section]
    junk = rng.choice([each for each in JUNK if each is not None or last != "num_hidden_layers"])
    record[last] = junk


def _types_of_layers(record: dict[str, Any], rng: random.Random) -> None:
    record["transformer_layer_config"]["layer_types"] = rng.choice(["x", 5, [5], ["full_attention", None], {"a": 1}])


def _anchor(record: dict[str, Any], rng: random.Random) -> None:
    record["sample_from_anchor"] = rng.choice(["x", 1, [], 0.5, {}])


def _unknown(record: dict[str, Any], rng: random.Random) -> None:
    where = rng.choice([record, record["transformer_layer_config"]])
    where[rng.choice(["logit_scale", "conv_kernel_size", "attention_sink_bias", "selector_rank"])] = rng.choice(
        [0.5, True, [1]]
    )


def _section(record: dict[str, Any], rng: random.Random) -> None:
    record["transformer_layer_config"] = rng.choice([None, 5, [], "x"])


@pytest.mark.parametrize("damage", [_field, _types_of_layers, _anchor, _unknown, _section])
def test_damaged_configs(damage: Damage, target: TargetInfo, tensors: TargetTensors, tmp_path: Path) -> None:
    """Each is a clear error and leaves no files."""
    good = own_files(tmp_path / "good", SPECULATORS, sharing("dflash", tensors), "lm_head.weight", "mask_embedding")
    for case in range(60):
        folder = tmp_path / "bad"
        shutil.copytree(good, folder)
        record = json.loads(json.dumps(SPECULATORS))
        damage(record, random.Random(case))
        (folder / "config.json").write_text(json.dumps(record))
        message = ""
        try:
            convert_checkpoint(folder, tmp_path / "out", to="vllm", target=target)
        except DraftsmithError as error:
            message = str(error)
        assert str(folder) in message, (case, record, message)
        assert len(message) < 1500
        assert {path.name for path in tmp_path.iterdir()} == {"good", "bad"}
        shutil.rmtree(folder)


# ---- in a recipe's methods ----


@pytest.mark.parametrize("cpu", [True, False])
def test_what_vllm_serves_as_it_is(
    cpu: bool, target: TargetInfo, tensors: TargetTensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z-lab's everywhere, DeepSpec's on GPUs: on CPUs our plugin serves it, which reads vLLM's layout only."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "is_cpu", lambda: cpu)
    zlab = own_files(tmp_path / "zlab", ZLAB, sharing("dflash", tensors), "lm_head.weight", "mask_embedding")
    deepspec = own_files(tmp_path / "deepspec", DEEPSPEC, sharing("dspark", tensors))
    recipe = recipe_for(target, str(zlab), "dflash")
    assert for_serving(recipe) == recipe
    assert recipe.serve.method is not None
    config = method_config(recipe.serve.method, target, own_drafter=Path("no"))
    assert config is not None
    assert (config["model"], config["method"], config["num_speculative_tokens"]) == (str(zlab), "dflash", 3)
    recipe = recipe_for(target, str(deepspec), "dspark")
    if cpu:
        copy = for_serving(recipe).serve.method
        assert isinstance(copy, TrainedDrafter)
        assert json.loads((Path(copy.model or "") / "config.json").read_text())["sample_from_anchor"] is True
    else:
        assert for_serving(recipe) == recipe
    record = DEEPSPEC | {"target_layer_ids": [0, 1, LAYERS]}
    (deepspec / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"reads the target's layers .*{LAYERS + 1}"):
        check_target(deepspec, target)


@pytest.mark.parametrize("cpu", [True, False])
def test_draft_tokens_that_the_plugin_does_not_draw(
    cpu: bool, target: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "is_cpu", lambda: cpu)
    FORMATS["vllm"].write(make_checkpoint("dspark", CONFIGS["dspark"]), tmp_path)
    asked = TrainedDrafter(method="dspark", options={"draft_sample_method": "probabilistic"})
    config = method_config(asked, target, own_drafter=tmp_path)
    assert config is not None
    assert config["draft_sample_method"] == ("greedy" if cpu else "probabilistic")
    assert ("draft_sample_method probabilistic -> greedy" in capsys.readouterr().err) is cpu


@pytest.mark.parametrize("window", [None, 2048])
def test_speculators_drafters_are_converted(
    window: int | None, target: TargetInfo, tensors: TargetTensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads the format too, and would see only earlier rows of a block (`sliding_window_non_causal`, as speculators leaves it)."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    made = sharing("dflash", tensors)
    record = _of_windows() if window else SPECULATORS
    folder = own_files(tmp_path / "theirs", record, made, "lm_head.weight", "mask_embedding")
    method = for_serving(recipe_for(target, str(folder), "dflash")).serve.method
    assert isinstance(method, TrainedDrafter)
    copy = Path(method.model or "")
    assert copy.parent == tmp_path / "cache" / "drafters"
    written = json.loads((copy / "config.json").read_text())
    assert (written["dflash_config"]["causal"], written.get("sliding_window")) == (window is not None, window)
    assert torch.equal(load_file(copy / "model.safetensors")["mask_embedding"], made.tensors["mask_embedding"])


def test_head_and_embedding_go_together(tensors: TargetTensors) -> None:
    """Of a target that is not named, speculators' classes take neither."""
    made = make_checkpoint("dspark", CONFIGS["dspark"])
    with pytest.raises(UserError, match=r"both embedding and head from the target or neither.*--target"):
        FORMATS["speculators"].to_files(made)
    _, stored = FORMATS["speculators"].to_files(made, shared=lambda: tensors)
    assert torch.equal(stored[EMBEDDING].tensor(), tensors.embedding)
    _, stored = FORMATS["speculators"].to_files(sharing("dspark", tensors), shared=lambda: tensors)
    assert not {EMBEDDING, "lm_head.weight"} & stored.keys()
