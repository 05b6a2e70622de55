"""Drafters in speculators' and z-lab's formats, which vLLM loads itself: it proposes what our modules do, as from our own directories."""

from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.config.drafters import KINDS
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.engine import environment, speculation
from draftsmith.run.weights import in_memory
from draftsmith.serve.proposals import compare_proposals, record
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import TINY_LAYERS, TINY_VOCAB, make_target
from tests.integration.test_kinds import PROMPTS, K
from tests.soak import in_soak

pytestmark = [pytest.mark.integration, in_soak]


def make_drafter(target: Path, folder: Path, kind: str, written: str) -> Drafter:
    """A random drafter of two layers in the format `written`, whose draft tokens depend on the context. z-lab's shares head and mask."""
    torch.manual_seed(3)
    about, tensors = describe_target(target), load_target_tensors(target)
    sized = (
        {"block_size": K + 1} if kind == "dflash" else {"num_depths": K, "fc_norm": False}
    )  # vLLM does not read that key
    shares, made = written == "zlab", drafter_class(kind)
    size = TINY_VOCAB if shares else 200
    options = KINDS[kind].model_validate({"num_layers": 2, "draft_vocab_size": size, **sized})
    config = made.make_config(options, about, (1, 2, TINY_LAYERS), size)
    ids = torch.randperm(TINY_VOCAB)[:size].sort().values
    drafter = made.from_target(config, tensors, ids)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.3, 3)
        else:
            nn.init.normal_(parameter, std=0.3 if "self_attn" in name or "mask" in name else 0.05)
    if isinstance(drafter, DFlashDrafter) and shares:
        drafter.lm_head.weight.data.copy_(tensors.lm_head)
        drafter.mask_embedding.data.copy_(tensors.embedding[drafter.config.mask_token_id])
    folder.mkdir()
    checkpoint = Checkpoint(kind, config.to_dict(), dict(UNKNOWN_TARGET), ids, in_memory(drafter.state_dict()))
    FORMATS[written].write(checkpoint.check(), folder, shared=lambda: tensors)
    return drafter.eval()


def test_vllm_loads_what_we_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    make_target(target)
    formats = {"p_eagle": "speculators", "dflash": "speculators", "zlab": "zlab"}
    kinds = {tmp_path / name: "dflash" if name == "zlab" else name for name in formats}
    drafters = {folder: make_drafter(target, folder, kind, formats[folder.name]) for folder, kind in kinds.items()}
    # What the directories of our own format say of themselves.
    monkeypatch.setattr(speculation, "serving_spec", lambda folder: KINDS[kinds[folder]].serving)
    monkeypatch.setattr(speculation, "needs_mend", lambda folder: environment.is_cpu() and kinds[folder] == "dflash")
    methods = {"p_eagle": "eagle3", "dflash": "dflash"}
    found = record([(folder, methods[kind]) for folder, kind in kinds.items()], target, PROMPTS, k=K, max_tokens=64)
    for folder, served in zip(kinds, found, strict=True):
        assert compare_proposals(served, drafters[folder], target)[K - 1] > 500, folder.name
        drafts = {tuple(proposal["draft"]) for proposal in served.proposals}
        assert len(drafts) > 100, "a drafter that ignores its context would be equal too"
