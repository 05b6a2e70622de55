"""Block drafters in others' formats, which vLLM loads itself or in a converted copy: it proposes what our modules do, as from our own
directories."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
from tests.integration.test_kinds import PROMPTS, K, as_served
from tests.soak import in_soak

pytestmark = [pytest.mark.integration, in_soak]


def make_drafter(target: Path, folder: Path, kind: str, written: str) -> Drafter:
    """A random drafter of two layers in the format `written`, whose draft tokens depend on the context. z-lab's shares head and mask; DeepSpec's
    drafts from the anchor's row, and both have the whole vocabulary."""
    torch.manual_seed(3)
    about, tensors = describe_target(target), load_target_tensors(target)
    sized: dict[str, Any] = {"block_size": K + 1}
    if kind == "p_eagle":
        sized = {"num_depths": K, "fc_norm": False}  # vLLM does not read that key
    elif written == "deepspec":
        sized = {"block_size": K, "sample_from_anchor": True, "enable_confidence_head": True}
    shares, made = written == "zlab", drafter_class(kind)
    size = TINY_VOCAB if written in ("zlab", "deepspec") else 200
    options = KINDS[kind].model_validate({"num_layers": 2, "draft_vocab_size": size, **sized})
    config = made.make_config(options, about, (1, 2, TINY_LAYERS), size)
    ids = torch.randperm(TINY_VOCAB)[:size].sort().values
    drafter = made.from_target(config, tensors, ids)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.3, 3)
        else:
            strong = any(part in name for part in ("self_attn", "mask", "markov"))
            nn.init.normal_(parameter, std=0.3 if strong else 0.05)
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
    asked = [(folder, methods[kind]) for folder, kind in kinds.items()]
    assert_trained_equals_served(asked, drafters.values(), target)


def test_dspark_is_served_from_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's first runner has no DSpark: a recipe that names one of speculators' or DeepSpec's gets a converted copy, for the plugin."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "target"
    make_target(target)
    formats = ("speculators", "deepspec")
    drafters = [make_drafter(target, tmp_path / written, "dspark", written) for written in formats]
    loaded = [as_served(tmp_path / written, "dspark", target) for written in formats]
    asked = [(folder, speculation.speculative_config(folder, K)["method"]) for folder in loaded]
    assert_trained_equals_served(asked, drafters, target)


def assert_trained_equals_served(asked: list[tuple[Path, str]], drafters: Iterable[Drafter], target: Path) -> None:
    found = record(asked, target, PROMPTS, k=K, max_tokens=64)
    for (folder, _), drafter, served in zip(asked, drafters, found, strict=True):
        assert compare_proposals(served, drafter, target)[K - 1] > 500, folder.name
        drafts = {tuple(proposal["draft"]) for proposal in served.proposals}
        assert len(drafts) > 100, "a drafter that ignores its context would be equal too"
