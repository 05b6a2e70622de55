"""What is served is what was trained: the second runner's proposals, for every kind of drafter that vLLM gives to it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner
from vllm_as_on_gpus.patches import notes

from draftsmith.cli import app
from draftsmith.config.drafters import KINDS
from draftsmith.convert.convert import convert_checkpoint, read, recognize
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.run.errors import DraftsmithError
from draftsmith.serve.proposals import compare_proposals, record
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import FAKE_KERNELS, demo_prompts, load_drafter

K = 3
POSITIONS = 170
"""At each of which every kind's proposals are compared, at every draft token."""
SPECULATORS = {
    "eagle": "EagleSpeculator",
    "eagle3": "EagleSpeculator",
    "mlp_speculator": "MlpSpeculatorV2",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}
"""By kind, the class that proposes: vLLM's own but for MLP speculators."""


@pytest.mark.parametrize(
    "name", ["eagle", "eagle3", "eagle3-embeddings", "mlp_speculator", "dflash", "dspark", "dspark-anchor"]
)
def test_trained_equals_served(target: TargetInfo, drafters: dict[str, Path], name: str, noted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [tokenizer(text[:60]).input_ids for text in demo_prompts(8)]
    kind = Checkpoint.load(drafters[name] / "checkpoint").kind
    method = KINDS[kind].serving.method  # on GPUs
    assert method is not None
    before = notes(noted).keys()
    (served,) = record([(drafters[name] / "vllm", method)], target.path, prompts, k=K, max_tokens=40)
    (note,) = (note for file, note in notes(noted).items() if file not in before)
    assert note["speculator"] == SPECULATORS[kind]

    drafter = load_drafter(drafters[name], target.path)
    compared = compare_proposals(served, drafter, target.path)
    assert len(compared) == K
    assert min(compared) >= POSITIONS, compared
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(-1)
    with pytest.raises(DraftsmithError, match="computes other draft tokens"):
        compare_proposals(served, drafter, target.path)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_eagle_3_with_8_bit_weights(target: TargetInfo, drafters: dict[str, Path], scheme: str, tmp_path: Path) -> None:
    """This runner compares the drafter's head with the target's, so it must have a `weight`. (With `int8-dynamic` it has one on GPUs; the
    kernel for CPUs takes it away.)"""
    convert_checkpoint(drafters["eagle3"] / "checkpoint", tmp_path / "out", to="vllm", quantize=scheme)
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [tokenizer(text[:60]).input_ids for text in demo_prompts(4)]
    drafter = [(tmp_path / "out", "eagle3")]
    (served,) = record(drafter, target.path, prompts, k=K, max_tokens=24, recorder=FAKE_KERNELS)
    held = read(tmp_path / "out", recognize(tmp_path / "out")).drafter(load_target_tensors(target.path))
    assert min(compare_proposals(served, held, target.path)) > 40


@pytest.mark.parametrize("name", ["eagle3", "mlp_speculator"])
def test_a_conversion_is_verified_in_vllm(
    target: TargetInfo, drafters: dict[str, Path], name: str, tmp_path: Path
) -> None:
    command = ["convert", str(drafters[name] / "checkpoint"), "--to", "vllm", "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, [*command, "--verify", "--target", str(target.path)])
    assert done.exit_code == 0, done.output
    proposals = json.loads(done.stdout)["verified"]["served"]["proposals"]
    assert len(proposals) == K
    assert min(proposals) > 100, proposals
