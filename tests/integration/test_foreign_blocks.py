"""P-EAGLE, DFlash and DSpark of speculators' own classes: read, they compute the same, and those classes compute what ours do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.convert.convert import convert_checkpoint, read, recognize
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.run.weights import in_memory
from draftsmith.store.format import Sequence
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.loss import _acceptance_weights
from draftsmith.train.packing import pack
from tests.families import save_tokenizer
from tests.integration.test_foreign import HIDDEN, LAYER, VOCAB, drive

pytestmark = pytest.mark.integration

ROWS, STEPS, MASK = 24, 4, 9
ANCHORS = [1, 5, 6, 13, 18]
NARROW = {**LAYER, "num_hidden_layers": 2, "vocab_size": VOCAB}
BLOCK: dict[str, Any] = {
    "block_size": STEPS + 1, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [1, 2, 4], "sample_from_anchor": False,
}  # fmt: skip
DSPARK: dict[str, Any] = BLOCK | {"markov_rank": 6, "enable_confidence_head": False}
AS_PUBLISHED: dict[str, Any] = {
    "block_size": STEPS, "sample_from_anchor": True, "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
P_EAGLE: dict[str, Any] = {"mask_token_id": MASK, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "p-eagle": ("peagle", "p_eagle", P_EAGLE | {"draft_vocab_size": 20}),
    "p-eagle with norms": (
        "peagle", "p_eagle", P_EAGLE | {"draft_vocab_size": VOCAB, "fc_norm": True, "norm_before_residual": True},
    ),
    "dflash": ("dflash", "dflash", BLOCK | {"draft_vocab_size": 20}),
    "dflash with the target's head": ("dflash", "dflash", BLOCK | {"draft_vocab_size": VOCAB}),
    "dspark": ("dspark", "dspark", DSPARK | {"draft_vocab_size": 20}),
    "dspark with the target's head": ("dspark", "dspark", DSPARK | {"draft_vocab_size": VOCAB}),
    "dspark as published": ("dspark", "dspark", DSPARK | AS_PUBLISHED | {"draft_vocab_size": VOCAB}),
}  # fmt: skip
"""By name: speculators' kind, ours, and the fields of its config."""
WINDOW = 3
"""Shorter than the texts, and than P-EAGLE's draft: its last slot is out of reach of all rows but its own."""
OPTIONS |= {
    "p-eagle as trained by default": ("peagle", "p_eagle", P_EAGLE | {"draft_vocab_size": 20, "norm_before_residual": True}),
    "dflash as trained by default": ("dflash", "dflash", BLOCK | {"draft_vocab_size": 20}),
    "dflash with windows in both directions": (
        "dflash", "dflash", BLOCK | {"draft_vocab_size": 20, "sliding_window_non_causal": True}
    ),
    "dspark as trained by default": ("dspark", "dspark", DSPARK | AS_PUBLISHED | {"draft_vocab_size": VOCAB}),
}  # fmt: skip
WITH_WINDOWS = [name for name in OPTIONS if name.endswith(("by default", "directions"))]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("speculators")
    torch.manual_seed(5)
    config = LlamaConfig(**{**NARROW, "num_hidden_layers": 6}, tie_word_embeddings=False)
    target = LlamaForCausalLM(config)
    for table in (target.model.embed_tokens, target.lm_head):
        torch.nn.init.normal_(table.weight, std=0.3)
    target.save_pretrained(root / "target")
    save_tokenizer(root / "target")
    return root


def write_job(folder: Path, theirs: str, options: dict[str, Any], window: int | None = None) -> None:
    folder.mkdir()
    job = {
        "kind": theirs, "layer": NARROW, "options": options, "target": str(folder.parent / "target"), "tokens": STEPS,
        "window": window,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    tensors = {
        "token_ids": torch.randint(0, VOCAB, (ROWS + 1,)), "hidden_states": torch.randn(ROWS, 3, HIDDEN), "anchors": torch.tensor(ANCHORS),
    }  # fmt: skip
    tensors["token_ids"][ANCHORS[1]] = MASK  # an anchor may be the mask's token
    save_file(tensors, folder / "inputs.safetensors")


@pytest.fixture(scope="module")
def made(root: Path) -> dict[str, Path]:
    """A folder for each of the options, with what speculators' class saved and what it computes."""
    folders = {}
    for name, (theirs, _, options) in OPTIONS.items():
        folders[name] = root / name.replace(" ", "-")
        write_job(folders[name], theirs, options, WINDOW if name in WITH_WINDOWS else None)
    drive("make", folders)
    return folders


def assert_same_logits(checkpoint: Checkpoint, folder: Path, how: str) -> None:
    """Our module's logits are theirs, of every row and draft token."""
    drafter = checkpoint.drafter(load_target_tensors(folder.parent / "target"))
    inputs, theirs = load_file(folder / "inputs.safetensors"), load_file(folder / f"{how}.safetensors")["logits"]
    sequence = Sequence(0, False, inputs["token_ids"], torch.ones(ROWS + 1, dtype=torch.bool), inputs["hidden_states"])
    batch = pack([sequence], steps=STEPS)
    queries = batch.loss_weights.sum(1).nonzero()[:, 0].tolist()
    with torch.no_grad():
        steps = [F.linear(step.normed, step.head) for step in drafter.chain(batch, steps=STEPS)]
    compared, first = (
        0,
        0 if checkpoint.config.get("sample_from_anchor") else 1,
    )  # theirs predicts nothing in earlier rows
    for k, ours in enumerate(steps):
        for at, row in enumerate(queries):
            if checkpoint.kind == "p_eagle" and row + k + 2 <= ROWS:
                expected = theirs[k, row]
            elif checkpoint.kind != "p_eagle" and row + 1 in ANCHORS:  # row p has the anchor p + 1
                expected = theirs[ANCHORS.index(row + 1), k + first]
            else:
                continue
            assert expected.std() > 0.1
            torch.testing.assert_close(ours[at], expected, rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared == (
        sum(ROWS - 1 - k for k in range(STEPS)) if checkpoint.kind == "p_eagle" else STEPS * len(ANCHORS)
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_speculators_drafters_are_read(made: dict[str, Path], name: str) -> None:
    folder = made[name]
    found = recognize(folder / "made")
    assert (found.format, found.kind) == ("speculators", OPTIONS[name][1])
    checkpoint = read(folder / "made", found, describe_target(folder.parent / "target"))
    assert checkpoint.config["sliding_window"] == (WINDOW if name in WITH_WINDOWS else None)
    assert_same_logits(checkpoint, folder, "make")


@pytest.fixture(scope="module")
def ours(root: Path) -> dict[str, tuple[Path, Checkpoint]]:
    """Drafters of ours, with masks and heads of their own, written for speculators."""
    target, found = load_target_tensors(root / "target"), {}
    for theirs, kind in (("peagle", "p_eagle"), ("dflash", "dflash"), ("dspark", "dspark")):
        for size in (20, VOCAB):
            folder = root / f"our-{kind}-{size}"
            write_job(folder, theirs, {})
            layer = {name: value for name, value in NARROW.items() if name != "num_hidden_layers"}
            config: dict[str, Any] = layer | {
                "num_layers": 2, "hidden_act": "silu", "layer_ids": [1, 2, 4], "draft_vocab_size": size, "mask_token_id": MASK,
            }  # fmt: skip
            if kind == "p_eagle":
                config |= {"norm_before_residual": False, "fc_norm": True, "norm_output": False, "num_depths": STEPS}
            else:
                config |= {"block_size": STEPS + 1} | ({"markov_rank": 6} if kind == "dspark" else {})
            if kind == "dspark" and size == VOCAB:
                config |= AS_PUBLISHED
            if size == VOCAB:
                config |= {"sliding_window": WINDOW, "qk_norm" if kind == "p_eagle" else "causal": True}
            made = drafter_class(kind)
            typed = made.config_class.from_dict(config)
            weights = {name: torch.randn(shape) * 0.3 + ("norm" in name) for name, shape in made.shapes(typed).items()}
            ids = torch.randperm(VOCAB)[:size].sort().values
            about = UNKNOWN_TARGET | {"name": str(root / "target")}
            checkpoint = Checkpoint(kind, typed.to_dict(), about, ids, in_memory(weights)).check()
            (folder / "converted").mkdir()
            FORMATS["speculators"].write(checkpoint, folder / "converted", shared=lambda: target)
            found[f"{kind} {size}"] = folder, checkpoint
    return found


@pytest.fixture(scope="module")
def loaded(made: dict[str, Path], ours: dict[str, tuple[Path, Checkpoint]]) -> None:
    """Its own drafters there and back, and ours, in its classes."""
    for folder in made.values():
        place = folder.parent / "target"
        target = replace(describe_target(place), name=str(place))  # as a Hub id would be: what its classes can load
        convert_checkpoint(folder / "made", folder / "own", to="draftsmith", target=target)
        convert_checkpoint(folder / "own", folder / "converted", to="speculators", target=target)
    drive("load", made | {name: folder for name, (folder, _) in ours.items()})


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("loaded")
def test_speculators_reads_what_we_write(made: dict[str, Path], name: str) -> None:
    """Its own drafters, there and back: the same tensors, and logits to the bit."""
    folder = made[name]
    before, after = (load_file(folder / each / "model.safetensors") for each in ("made", "converted"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    before, after = (load_file(folder / f"{how}.safetensors") for how in ("make", "load"))
    assert torch.equal(before["logits"], after["logits"])


@pytest.mark.parametrize("name", [f"{kind} {size}" for kind in ("p_eagle", "dflash", "dspark") for size in (20, VOCAB)])
@pytest.mark.usefixtures("loaded")
def test_speculators_computes_what_ours_do(ours: dict[str, tuple[Path, Checkpoint]], name: str) -> None:
    """Its classes must not take the target's mask or head instead."""
    folder, checkpoint = ours[name]
    assert_same_logits(checkpoint, folder, "load")


@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_draft_tokens_weigh_as_speculators_says(alpha: float, tmp_path: Path) -> None:
    """D-PACE, in blocks that are trained up to some draft token; row 0 of speculators' is the anchor. Past a token that is not trained, ours have
    less weight, since no draft gets past it."""
    blocks, generator = 50, torch.Generator().manual_seed(0)
    trained = torch.arange(STEPS) < torch.randint(1, STEPS + 1, (blocks, 1), generator=generator)
    likely = torch.rand(blocks, STEPS, generator=generator)
    mask = F.pad(trained.float(), (1, 0))
    save_file({"mask": mask, "cross_entropy": F.pad(-likely.log(), (1, 0))}, tmp_path / "inputs.safetensors")
    (tmp_path / "job.json").write_text(json.dumps({"alpha": alpha}))
    drive("weigh", {"dpace": tmp_path})
    theirs = load_file(tmp_path / "weigh.safetensors")["weights"][:, 1:]
    place = trained.flatten().nonzero()[:, 0]
    ours = _acceptance_weights(likely.flatten()[place], place, rows=blocks, steps=STEPS, alpha=alpha)
    torch.testing.assert_close(ours, theirs.flatten()[place], rtol=1e-5, atol=1e-6)
    assert len(place) > 2 * blocks
