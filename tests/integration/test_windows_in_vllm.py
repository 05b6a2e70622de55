"""Sliding windows in stock vLLM's first runner, and how it counts them: tiny drafters, and contexts longer than their windows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.convert.convert import read, recognize
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters import dflash
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.engine import speculation
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.serve.proposals import compare_proposals, record
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import make_target
from tests.integration.test_kinds import DRAFT_VOCAB, PROMPTS, TOKENS, Case, K, make_drafter
from tests.soak import in_soak

pytestmark = [pytest.mark.integration, in_soak]

WINDOW = 24
CASES = {
    "p_eagle": Case(
        "p_eagle",
        {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 2, "num_depths": K},
        further={"sliding_window": WINDOW, "qk_norm": True},
    ),
    "dflash": Case(
        "dflash",
        {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 2, "block_size": K + 1, "causal": True},
        further={"sliding_window": WINDOW},
    ),
}


class _FromEachRow:
    """A context as vLLM shows it to blocks: row j, at p + 1 + j, sees the `WINDOW` positions up to its own."""

    def __init__(self, batch: Batch, queries: torch.Tensor, *, block: int, group: int) -> None:
        self.keys, self.queries, self.block, self.group = torch.arange(len(batch.positions)), queries, block, group

    def attend(
        self, grouped: torch.Tensor, own_scores: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Tiles.attend`; of one document."""
        rows = torch.arange(self.block)[self.block - grouped.shape[2] // self.group :].repeat_interleave(self.group)
        ends = self.queries[:, None] + 1 + rows  # [Q, R * G]
        seen = (self.keys > ends[..., None] - WINDOW) & (self.keys <= self.queries[:, None, None])
        scores = torch.einsum("qmrc,mtc->qmrt", grouped, context[0]).masked_fill(~seen[:, None], -torch.inf)
        weights = torch.cat([scores, own_scores], dim=-1).softmax(-1)
        mixed = torch.einsum("qmrt,mtc->qmrc", weights[..., : len(self.keys)], context[1])
        return mixed, weights[..., len(self.keys) :]


def without_window(drafter: Drafter) -> Drafter:
    drafter.config = replace(drafter.config, sliding_window=None)  # type: ignore[call-arg]
    return drafter


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target, and the drafters' directories."""
    root = tmp_path_factory.mktemp("windows")
    make_target(root / "target")
    for name, case in CASES.items():
        drafter = make_drafter(case, root / "target")
        (root / name).mkdir()
        checkpoint = Checkpoint(
            case.kind,
            drafter.config.to_dict(),
            dict(UNKNOWN_TARGET),
            drafter.draft_token_ids,
            in_memory(drafter.state_dict()),
        )
        FORMATS["vllm"].write(checkpoint.check(), root / name)
    return {name: root / name for name in ("target", *CASES)}


def test_windows_are_those_of_p_eagle_and_are_counted_from_each_row_of_a_block(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folders = made["target"], [made[name] for name in CASES]
    methods = [speculation.speculative_config(folder, K)["method"] for folder in folders]
    served = dict(
        zip(
            CASES,
            record(list(zip(folders, methods, strict=True)), target, PROMPTS, k=K, max_tokens=TOKENS),
            strict=True,
        )
    )

    def drafter(name: str) -> Drafter:
        found = read(made[name], recognize(made[name]), describe_target(target))
        return found.drafter(load_target_tensors(target)).eval()

    assert max(len(proposal["context"]) for proposal in served["p_eagle"].proposals) > 3 * WINDOW
    assert min(compare_proposals(served["p_eagle"], drafter("p_eagle"), target)) > 500
    with pytest.raises(DraftsmithError, match="other draft tokens"):
        compare_proposals(served["p_eagle"], without_window(drafter("p_eagle")), target)

    with pytest.raises(
        DraftsmithError, match="other draft tokens"
    ):  # as speculators trains: from the block's first row
        compare_proposals(served["dflash"], drafter("dflash"), target)

    def context_of(batch: Batch, queries: torch.Tensor, *, heads: int, block: int, **others: object) -> _FromEachRow:
        return _FromEachRow(batch, queries, block=block, group=1)  # the tiny target has a key/value head for each

    monkeypatch.setattr(dflash, "context_of", context_of)
    assert min(compare_proposals(served["dflash"], drafter("dflash"), target)) > 500
