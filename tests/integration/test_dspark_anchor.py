"""DSpark as published in vLLM: blocks whose first row drafts too, with a confidence head, are served as they are trained."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.config.drafters import DSparkOptions
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.drafters.dspark import DSparkDrafter
from draftsmith.engine import speculation
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.serve.proposals import compare_proposals, record
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import TINY_LAYERS, TINY_VOCAB, make_target

pytestmark = pytest.mark.integration

K = 4
PROMPTS = [[(7 * number + 3 * place * place) % 250 for place in range(5 + 3 * number)] for number in range(16)]


def make_drafter(target: Path, folder: Path, *, causal: bool) -> DSparkDrafter:
    """A random drafter in the directory `folder`, whose draft tokens depend on the context, on every norm and on the token before."""
    torch.manual_seed(0)
    options = DSparkOptions(
        block_size=K,
        num_layers=2,
        draft_vocab_size=200,
        causal=causal,
        sample_from_anchor=True,
        enable_confidence_head=True,
    )
    config = DSparkDrafter.make_config(options, describe_target(target), (1, 2, TINY_LAYERS), 200)
    ids = torch.randperm(TINY_VOCAB)[:200].sort().values
    drafter = DSparkDrafter.from_target(config, load_target_tensors(target), ids)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.3, 3)
        else:
            # Attention must outweigh the residual stream, or the draft tokens are the same whatever it reads.
            stronger = {"self_attn": 0.3, "markov": 0.5}
            nn.init.normal_(parameter, std=next((std for part, std in stronger.items() if part in name), 0.05))
    folder.mkdir()
    checkpoint = Checkpoint("dspark", config.to_dict(), dict(UNKNOWN_TARGET), ids, in_memory(drafter.state_dict()))
    FORMATS["vllm"].write(checkpoint.check(), folder)
    return drafter.eval()


def test_trained_equals_served(tmp_path: Path) -> None:
    """K is the whole block: as many draft tokens as rows. A drafter that was served with a row more, as DFlash's are, drafts others."""
    target = tmp_path / "target"
    make_target(target)
    folders = {causal: tmp_path / f"causal-{causal}" for causal in (False, True)}
    drafters = {causal: make_drafter(target, folder, causal=causal) for causal, folder in folders.items()}
    asked = [(folder, speculation.speculative_config(folder, K)["method"]) for folder in folders.values()]
    for (causal, drafter), found in zip(
        drafters.items(), record(asked, target, PROMPTS, k=K, max_tokens=64), strict=True
    ):
        assert compare_proposals(found, drafter, target)[K - 1] > 500, causal
        assert len({tuple(proposal["draft"]) for proposal in found.proposals}) > 100, (
            "it would be equal without context"
        )
        # The same weights as blocks whose anchor row does not draft, which the plugin would serve without `sample_from_anchor`, and as blocks
        # whose rows see later ones, or do not.
        right = drafter.config
        for other in (
            replace(right, sample_from_anchor=False, block_size=K + 1),
            replace(right, causal=not right.causal),
        ):
            drafter.config = other
            with pytest.raises(DraftsmithError, match="computes other draft tokens"):
                compare_proposals(found, drafter, target)


def test_fewer_draft_tokens_than_rows(tmp_path: Path) -> None:
    """Blocks of one row, and of two: the module drafts in blocks of that many rows too."""
    target, folder = tmp_path / "target", tmp_path / "drafter"
    make_target(target)
    drafter = make_drafter(target, folder, causal=False)
    for k in (1, 2):
        (found,) = record(
            [(folder, speculation.speculative_config(folder, k)["method"])], target, PROMPTS, k=k, max_tokens=24
        )
        assert compare_proposals(found, drafter, target)[k - 1] > 150, k
