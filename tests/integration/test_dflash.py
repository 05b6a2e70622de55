"""Block drafters in vLLM: what it proposes is what the module proposes, on CPUs with the plugin's mend and not without."""

from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.config.drafters import KINDS
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.engine import environment, speculation
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.serve.proposals import Served, compare_proposals, record
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import TINY_LAYERS, TINY_VOCAB, make_target

pytestmark = pytest.mark.integration

K = 4
PROMPTS = [[(7 * number + 3 * place * place) % 250 for place in range(5 + 3 * number)] for number in range(16)]


def make_drafter(target: Path, folder: Path, kind: str, layers: int) -> Drafter:
    """A random drafter in the directory `folder`, whose draft tokens depend on the context and on every norm."""
    torch.manual_seed(layers)
    about = describe_target(target)
    options = KINDS[kind].model_validate({"block_size": K + 2, "num_layers": layers, "draft_vocab_size": 200})
    made = drafter_class(kind)
    config = made.make_config(options, about, (1, 2, TINY_LAYERS), 200)
    ids = torch.randperm(TINY_VOCAB)[:200].sort().values
    drafter = made.from_target(config, load_target_tensors(target), ids)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.3, 3)
        else:
            # Attention must outweigh the residual stream, or the draft tokens are the same whatever it reads.
            stronger = {"self_attn": 0.3, "markov": 0.5}
            nn.init.normal_(parameter, std=next((std for part, std in stronger.items() if part in name), 0.05))
    folder.mkdir()
    checkpoint = Checkpoint(kind, config.to_dict(), dict(UNKNOWN_TARGET), ids, in_memory(drafter.state_dict()))
    FORMATS["vllm"].write(checkpoint.check(), folder)
    return drafter.eval()


Name = tuple[str, int]
"""A kind, and a number of layers."""


def test_trained_equals_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    make_target(target)
    names = [("dflash", 1), ("dflash", 2), ("dflash", 3), ("dspark", 2)]
    folders = {name: tmp_path / f"{name[0]}-{name[1]}" for name in names}
    drafters = {name: make_drafter(target, folder, *name) for name, folder in folders.items()}

    def served(*which: Name) -> list[Served]:
        asked = [(folders[name], speculation.speculative_config(folders[name], K)["method"]) for name in which]
        return record(asked, target, PROMPTS, k=K, max_tokens=64)

    needed = [name for name in names if speculation.needs_mend(folders[name])]
    assert needed == (names[1:] if environment.is_cpu() else [])
    others = names[1:]
    for name, found in [*zip(others, served(*others), strict=True), (names[0], *served(names[0]))]:
        assert compare_proposals(found, drafters[name], target)[K - 1] > 500, name
        drafts = {tuple(proposal["draft"]) for proposal in found.proposals}
        assert len(drafts) > 100, "a drafter that ignores its context would be equal too"
    if environment.is_cpu():
        monkeypatch.setattr(speculation, "needs_mend", lambda _: False)
        (faulty,) = served(("dflash", 2))
        with pytest.raises(DraftsmithError, match="computes other draft tokens"):
            compare_proposals(faulty, drafters["dflash", 2], target)
