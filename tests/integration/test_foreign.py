"""Checkpoints that other projects' own classes made: converted, they compute what those classes compute."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.convert.convert import convert_checkpoint, read, recognize
from draftsmith.drafters.checkpoint import EMBEDDING
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.run.errors import UserError
from draftsmith.store.format import Sequence
from draftsmith.train.packing import pack
from tests.benchmarks.peer_speculators import environment

pytestmark = pytest.mark.integration
DRIVER = Path(__file__).with_name("speculators_drafter.py")
VOCAB, HIDDEN, STEPS = 60, 16, 3
LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 20, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    "as trained by default": {"draft_vocab_size": 20, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
                              "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    "whole vocabulary": {"draft_vocab_size": VOCAB, "fc_norm": True, "eagle_aux_hidden_state_layer_ids": [0, 4]},
}  # fmt: skip


ROWS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each of the options, with what speculators' class saved and what it computes."""
    root = tmp_path_factory.mktemp("speculators")
    LlamaForCausalLM(LlamaConfig(**{**LAYER, "num_hidden_layers": 6})).save_pretrained(root / "target")
    folders = {}
    for name, options in OPTIONS.items():
        folder = folders[name] = root / name.replace(" ", "-")
        folder.mkdir()
        job: dict[str, Any] = {"layer": LAYER, "options": options, "target": str(root / "target")}
        if name == "as trained by default":
            job |= {"layer": LAYER | {"num_hidden_layers": 2}, "window": 3}
        (folder / "job.json").write_text(json.dumps(job))
        states = torch.randn(ROWS, len(options["eagle_aux_hidden_state_layer_ids"]), HIDDEN)
        save_file(
            {"token_ids": torch.randint(0, VOCAB, (ROWS + 1,)), "hidden_states": states}, folder / "inputs.safetensors"
        )
    drive("make", folders)
    return folders


def drive(how: str, folders: dict[str, Path]) -> None:
    command = [environment(), DRIVER, how, *folders.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", OPTIONS)
def test_speculators_drafters_are_read(made: dict[str, Path], name: str) -> None:
    folder = made[name]
    found = recognize(folder / "made")
    assert (found.format, found.kind) == ("speculators", "eagle3")
    checkpoint = read(folder / "made", found)
    assert checkpoint.target["name"] == str(folder.parent / "target")
    tensors = {key: weight.tensor() for key, weight in checkpoint.weights.items()}
    config = checkpoint.drafter_config()
    assert isinstance(config, Eagle3Config)
    drafter = Eagle3Drafter(config, tensors.pop(EMBEDDING), checkpoint.draft_token_ids)
    drafter.load_state_dict(tensors)
    inputs, theirs = load_file(folder / "inputs.safetensors"), load_file(folder / "make.safetensors")["logits"]
    sequence = Sequence(0, False, inputs["token_ids"], torch.ones(ROWS + 1, dtype=torch.bool), inputs["hidden_states"])
    batch = pack([sequence], steps=STEPS)
    with torch.no_grad():
        for k, step in enumerate(drafter.chain(batch, steps=STEPS)):
            counted = int((step.loss_weights > 0).sum())  # rows from 0 on whose token at this step is known
            assert counted == ROWS - 1 - k
            ours = F.linear(step.normed[:counted], step.head)
            torch.testing.assert_close(ours, theirs[k, :counted], rtol=1e-4, atol=1e-5)


def test_speculators_reads_what_we_write(made: dict[str, Path]) -> None:
    for folder in made.values():
        convert_checkpoint(folder / "made", folder / "own", to="draftsmith")
        convert_checkpoint(folder / "own", folder / "converted", to="speculators")
    drive("load", made)
    for folder in made.values():
        before, after = (load_file(folder / f"{how}.safetensors")["logits"] for how in ("make", "load"))
        assert torch.equal(before, after)


def test_layers_that_are_not_ours_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    """Qwen3's layers norm queries and keys: dropping those norms would convert without any error, and serve nonsense."""
    shutil.copytree(made["plain"] / "made", tmp_path / "made")
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    save_file(tensors | {"layers.0.self_attn.q_norm.weight": torch.ones(8)}, tmp_path / "made" / "model.safetensors")
    with pytest.raises(UserError, match=r"has no tensors .*q_norm"):
        convert_checkpoint(tmp_path / "made", tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()
