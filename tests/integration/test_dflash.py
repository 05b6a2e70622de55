"""DFlash in vLLM: what it proposes is what the module proposes, on CPUs with the plugin's mend and not without."""

from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.config.drafters import DFlashOptions
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.engine import environment, speculation
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.serve.proposals import compare_proposals, record
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import TINY_LAYERS, TINY_VOCAB, make_target

pytestmark = pytest.mark.integration

K = 4
PROMPTS = [[(7 * number + 3 * place * place) % 250 for place in range(5 + 3 * number)] for number in range(16)]


def make_drafter(target: Path, folder: Path, *, layers: int) -> DFlashDrafter:
    """A random drafter in the directory `folder`, whose draft tokens depend on the context and on every norm."""
    torch.manual_seed(layers)
    about = describe_target(target)
    options = DFlashOptions(block_size=K + 2, num_layers=layers, draft_vocab_size=200)
    config = DFlashDrafter.make_config(options, about, (1, 2, TINY_LAYERS), 200)
    ids = torch.randperm(TINY_VOCAB)[:200].sort().values
    drafter = DFlashDrafter.from_target(config, load_target_tensors(target), ids)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.3, 3)
        else:
            # Attention must outweigh the residual stream, or the draft tokens are the same whatever it reads.
            nn.init.normal_(parameter, std=0.3 if "self_attn" in name else 0.05)
    folder.mkdir()
    checkpoint = Checkpoint("dflash", config.to_dict(), dict(UNKNOWN_TARGET), ids, in_memory(drafter.state_dict()))
    FORMATS["vllm"].write(checkpoint.check(), folder)
    return drafter.eval()


def test_trained_equals_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    make_target(target)
    drafters = {layers: make_drafter(target, tmp_path / f"of-{layers}", layers=layers) for layers in (1, 2, 3)}

    def served(*layers: int) -> list:
        folders = [(tmp_path / f"of-{count}", "dflash") for count in layers]
        return record(folders, target, PROMPTS, k=K, max_tokens=64)

    for layers, found in zip((2, 3), served(2, 3), strict=True):
        assert compare_proposals(found, drafters[layers], target)[K - 1] > 500
        drafts = {tuple(proposal["draft"]) for proposal in found.proposals}
        assert len(drafts) > 100, "a drafter that ignores its context would be equal too"
    assert speculation.needs_mend(tmp_path / "of-2") == environment.is_cpu()
    assert not speculation.needs_mend(tmp_path / "of-1")
    (alone,) = served(1)
    assert compare_proposals(alone, drafters[1], target)[K - 1] > 500
    if environment.is_cpu():
        monkeypatch.setattr(speculation, "needs_mend", lambda _: False)
        (faulty,) = served(2)
        with pytest.raises(DraftsmithError, match="computes other draft tokens"):
            compare_proposals(faulty, drafters[2], target)
