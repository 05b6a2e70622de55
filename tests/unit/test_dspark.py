"""DSpark: DFlash's blocks with the term of the token before, true in training and its own in serving."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.convert.convert import Found, read
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.dflash import DFlashConfig, DFlashDrafter
from draftsmith.drafters.dspark import DSparkConfig, DSparkDrafter
from draftsmith.engine import environment, speculation
from draftsmith.run.errors import UserError
from draftsmith.serve.plugin.dspark import proposer_v1
from draftsmith.train.acceptance import count_accepted
from draftsmith.train.packing import pack
from tests.unit.test_dflash import DOCUMENTS, MASK, STEPS
from tests.unit.test_dflash import make_drafter as make_dflash
from tests.unit.test_eagle3 import VOCAB, make_sequence
from tests.unit.tiny_run import make_converted


def make_drafter() -> tuple[DSparkDrafter, DFlashDrafter]:
    """A random drafter, and one without its Markov head, whose mask is the same."""
    plain = make_dflash()
    fields = plain.config.to_dict() | {"markov_rank": 3}
    drafter = DSparkDrafter(DSparkConfig.from_dict(fields), plain.embedding, plain.draft_token_ids).double()
    shared = {name: value for name, value in plain.state_dict().items() if name != "mask_embedding"}
    drafter.load_state_dict(shared, strict=False)
    for parameter in drafter.markov_head.parameters():
        nn.init.normal_(parameter, std=2)
    plain.mask_embedding.data.copy_(plain.embedding[MASK])
    assert isinstance(plain.config, DFlashConfig)
    return drafter, plain


def compare_with_dflash(drafter: DSparkDrafter, plain: DFlashDrafter, *, autoregressive: bool) -> None:
    """Logits are those of the drafter without its Markov head, and the term of the token before."""
    batch = pack(DOCUMENTS, steps=STEPS)
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    tokens, w1, w2 = batch.next_tokens[rows, 0], *drafter.markov_head.parameters()
    own = 0
    pairs = zip(
        drafter.chain(batch, steps=STEPS, autoregressive=autoregressive), plain.chain(batch, steps=STEPS), strict=True
    )
    for k, (found, base) in enumerate(pairs):
        expected = F.linear(base.normed, base.head) + w1[tokens] @ w2.T
        torch.testing.assert_close(F.linear(found.normed, found.head), expected, rtol=1e-9, atol=1e-9)
        true, drafted = batch.next_tokens[rows, k + 1], drafter.draft_token_ids[expected.argmax(-1)]
        own += int((true != drafted).sum())
        tokens = drafted if autoregressive else true
    assert own > 50


@pytest.mark.parametrize("autoregressive", [False, True])
def test_logits_are_dflashs_and_those_of_the_token_before(autoregressive: bool) -> None:
    compare_with_dflash(*make_drafter(), autoregressive=autoregressive)


@pytest.mark.parametrize("fault", ["mask token", "norm of the context", "norm of keys", "norm of the output"])
def test_the_comparison_would_notice(fault: str) -> None:
    """Another token's row as the mask, and norms left out."""
    drafter, plain = make_drafter()
    if fault == "mask token":
        drafter.config = replace(drafter.config, mask_token_id=MASK + 1)
    elif fault == "norm of the context":
        drafter.hidden_norm = nn.Identity()  # type: ignore[assignment]
    elif fault == "norm of keys":
        drafter.decoder_layers()[-1].self_attn.k_norm = None
    else:
        drafter.norm = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="not close"):
        compare_with_dflash(drafter, plain, autoregressive=False)


def test_what_is_predicted_is_what_its_own_drafts_would_have_accepted() -> None:
    """Where all drafts before are right, the token before is the true one, so true tokens tell what own drafts do."""
    drafter, _ = make_drafter()
    ids = drafter.draft_token_ids
    documents = [replace(make_sequence(60, 8, i), token_ids=ids[torch.randint(0, 3, (60,))].int()) for i in range(6)]
    batch = pack(documents, steps=2)
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    runs = []
    for autoregressive in (False, True):
        drafts = [
            ids[F.linear(s.normed, s.head).argmax(-1)]
            for s in drafter.chain(batch, steps=2, autoregressive=autoregressive)
        ]
        right = (torch.stack(drafts, dim=1) == batch.next_tokens[rows, 1:]) & (batch.loss_weights[rows] > 0)
        runs.append(right.int().cumprod(1).sum(1))
    assert torch.equal(*runs)
    assert runs[0].max() == 2
    assert count_accepted(drafter, [batch], k=2)[2][0] > 0


def test_what_vllm_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm/model_executor/models/qwen3_dspark.py; the mask is a row of the target's embedding there."""
    drafter = {"kind": "dspark", "block_size": 4, "markov_rank": 5, "draft_vocab_size": 60}
    run_dir = make_converted(tmp_path, drafter, epochs=0.3)
    folder = run_dir / "vllm"
    config = json.loads((folder / "config.json").read_text())
    said = (
        "architectures",
        "markov_rank",
        "markov_head_type",
        "sample_from_anchor",
        "enable_confidence_head",
        "block_size",
    )
    assert [config[name] for name in said] == [["Qwen3DSparkModel"], 5, "vanilla", False, False, 4]
    assert config["dflash_config"]["mask_token_id"] == 79
    assert not (folder / "mask_embedding.pt").exists()
    found, again = Checkpoint.load(run_dir / "checkpoint"), read(folder, Found("vllm", "dspark", ""))
    assert found.tensors["markov_head.markov_w2.weight"].any()
    assert all(torch.equal(again.tensors[name], value) for name, value in found.tensors.items())
    for on_cpu, method in ((True, "dflash"), (False, "dspark")):
        monkeypatch.setattr(environment, "is_cpu", lambda on_cpu=on_cpu: on_cpu)
        assert speculation.speculative_config(folder, 3)["method"] == method
        assert speculation.needs_mend(folder) is on_cpu
    assert speculation.own_drafter(folder).method == "dspark"
    with pytest.raises(UserError, match="at most 3 tokens, and 4 were requested"):
        speculation.speculative_config(folder, 4)


class Model:
    """As much of vLLM's as the proposer relies on."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        self.drafter, self.markov_embed = drafter, drafter.markov_head.markov_w1
        self.markov_bias, self.compute_draft_logits = drafter.markov_head.markov_w2, drafter.lm_head

    def map_draft_to_target(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.drafter.draft_token_ids[tokens]


class Proposer:
    def __init__(self, model: Model, input_ids: torch.Tensor, steps: int, *, from_anchor: bool | None = False) -> None:
        self.model, self.input_ids, self.num_speculative_tokens = model, input_ids, steps
        said = {} if from_anchor is None else {"sample_from_anchor": from_anchor}
        self.draft_model_config = SimpleNamespace(hf_config=SimpleNamespace(**said))
        self.arange = torch.arange(1000, dtype=torch.int32)

    def set_inputs_first_pass(self, requests: int) -> tuple[int, torch.Tensor, str]:
        """As vLLM's lays out blocks: a row more than draft tokens, and draft tokens from all but the first."""
        steps = self.num_speculative_tokens
        rows = torch.arange(requests * (steps + 1)).view(requests, -1)
        return rows.numel(), rows[:, 1:].flatten(), f"metadata of {rows.shape[1]} rows each"


@torch.no_grad()
def test_the_plugins_proposer_drafts_as_the_module() -> None:
    drafter, plain = make_drafter()
    batch = pack(DOCUMENTS, steps=STEPS)
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    states = torch.stack([step.normed for step in plain.chain(batch, steps=STEPS)], dim=1).flatten(0, 1)
    ids = torch.full((len(rows) + 3, STEPS + 1), MASK)  # the buffer is longer than what is used of it
    ids[: len(rows), 0] = batch.next_tokens[rows, 0]
    proposer: Any = proposer_v1(Proposer)(Model(drafter), ids.flatten(), STEPS)
    found, probabilities = proposer._sample_draft_tokens(states, SimpleNamespace())
    steps = drafter.chain(batch, steps=STEPS, autoregressive=True)
    expected = torch.stack([drafter.draft_token_ids[F.linear(s.normed, s.head).argmax(-1)] for s in steps], dim=1)
    assert probabilities is None
    assert torch.equal(found.view(-1, STEPS), expected)
    assert found.max() < VOCAB
