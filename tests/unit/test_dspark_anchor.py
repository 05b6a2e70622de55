"""DSpark as published: drafts from the anchor's row, the confidence head, and the loss of three terms, against plain formulas."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.config.drafters import DSparkOptions
from draftsmith.config.training import TrainConfig
from draftsmith.convert.convert import Found, read
from draftsmith.drafters.base import LossTerms
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.dspark import DSparkConfig, DSparkDrafter
from draftsmith.engine import speculation
from draftsmith.run.errors import UserError
from draftsmith.serve.plugin.dspark import proposer_v1
from draftsmith.train.loss import BlockLoss
from draftsmith.train.packing import pack
from tests.unit.planted import norms_of, other_config, reads_next_token, shifted
from tests.unit.test_dflash import (
    BLOCK,
    DOCUMENTS,
    FAULTS_OF_BLOCKS,
    MANY,
    MASK,
    NORMS,
    compare_subset_with_whole,
    plain_block,
)
from tests.unit.test_dflash import make_drafter as make_dflash
from tests.unit.test_dspark import Model, Proposer
from tests.unit.test_eagle3 import DRAFT, HIDDEN
from tests.unit.tiny_run import make_converted

RANK = 3
PUBLISHED = {"token_weight": 0.1, "variation_weight": 0.9, "confidence_weight": 1.0, "supervised_prefix": True}


def make_drafter(*, from_anchor: bool = True, with_markov: bool = True, **changes: object) -> DSparkDrafter:
    """Random, with every head."""
    plain = make_dflash(**changes)
    more = {
        "markov_rank": RANK, "sample_from_anchor": from_anchor, "enable_confidence_head": True,
        "confidence_head_with_markov": with_markov,
    }  # fmt: skip
    config = DSparkConfig.from_dict(plain.config.to_dict() | more)
    drafter = DSparkDrafter(config, plain.embedding, plain.draft_token_ids).double()
    drafter.load_state_dict({n: v for n, v in plain.state_dict().items() if n != "mask_embedding"}, strict=False)
    for parameter in (*drafter.markov_head.parameters(), *drafter.confidence_head.parameters()):
        nn.init.normal_(parameter, std=1)
    return drafter


def steps_of(drafter: DSparkDrafter) -> int:
    assert drafter.max_draft_tokens == BLOCK - (0 if drafter.config.sample_from_anchor else 1)
    return drafter.max_draft_tokens


def found_logits(drafter: DSparkDrafter, batch: Batch, *, steps: int) -> torch.Tensor:
    return torch.stack([F.linear(step.normed, step.head) for step in drafter.chain(batch, steps=steps)], dim=1)


def plain_logits(drafter: DSparkDrafter, batch: Batch, *, steps: int) -> torch.Tensor:
    """[Q, steps, V] by the formulas, one dense forward pass for each block."""
    weights = dict(drafter.named_parameters())
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    rows = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0].tolist()
    found = []
    for row in rows:
        document, p = int(batch.documents[row]), int(batch.positions[row])
        from_anchor = drafter.config.sample_from_anchor
        logits = plain_block(drafter, DOCUMENTS[document], p, weights, steps=steps, from_anchor=from_anchor)
        found.append(logits + w1[batch.next_tokens[row, :steps]] @ w2.T)
    return torch.stack(found)


def compare_with_plain(drafter: DSparkDrafter, right: DSparkDrafter, *, steps: int = BLOCK) -> None:
    """Logits, and gradients of a random function of them; `right` is the same drafter without the fault that may be planted in the first."""
    batch = pack(DOCUMENTS, steps=steps_of(right))
    found, expected = found_logits(drafter, batch, steps=steps), plain_logits(right, batch, steps=steps)
    assert len(found) > 25
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    of_both = ([p for n, p in d.named_parameters() if "confidence" not in n] for d in (drafter, right))
    picks = torch.randn_like(found)
    gradients = (
        torch.autograd.grad((x * picks).sum(), parameters)
        for x, parameters in zip((found, expected), of_both, strict=True)
    )
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("steps", [BLOCK, 2, 1])
@pytest.mark.parametrize("changes", [{}, {"num_layers": 1}, {"num_layers": 3, "causal": True}])
def test_every_row_predicts_the_token_after_its_own(changes: dict, steps: int) -> None:
    compare_with_plain(make_drafter(**changes), make_drafter(**changes), steps=steps)


def markov_head_reads_next_token(drafter: DSparkDrafter, patch: pytest.MonkeyPatch) -> None:
    block = drafter.block
    reads_next_token("chain")(drafter, patch)
    patch.setattr(drafter, "block", lambda batch, *rest: block(shifted(batch, -1), *rest))


FAULTS = FAULTS_OF_BLOCKS | {
    "anchor does not predict": other_config(sample_from_anchor=False),
    "Markov head reads a token late": markov_head_reads_next_token,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_would_notice(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter()
    assert norms_of(drafter) == set(NORMS)
    FAULTS[fault](drafter, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_plain(drafter, make_drafter())


# ---- the loss ----


def plain_loss(
    drafter: DSparkDrafter, batch: Batch, head: torch.Tensor, terms: LossTerms, decay: float, *, fault: str = ""
) -> torch.Tensor:
    """The loss by its formulas, draft token by draft token, over the whole draft vocabulary."""
    assert batch.last_states is not None
    steps = steps_of(drafter)
    rows = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0].tolist()
    logits = found_logits(drafter, batch, steps=steps)
    ids = drafter.draft_token_ids.tolist()
    w1, proj = drafter.markov_head.markov_w1.weight, drafter.confidence_head.proj
    sums = [logits.new_zeros(()) for _ in range(steps)]
    counts = [0.0] * steps
    chain = list(drafter.chain(batch, steps=steps))
    for place, row in enumerate(rows):
        for k in range(steps):
            token, weight = int(batch.next_tokens[row, k + 1]), float(batch.loss_weights[row, k])
            if token not in ids or not weight:
                if terms.supervised_prefix and fault != "no prefix":
                    break
                continue
            teacher = row + 1 + k + (1 if fault == "teacher late" and row + 2 + k < len(batch.positions) else 0)
            p = (head @ batch.last_states[teacher]).softmax(-1)
            q = logits[place, k].softmax(-1)
            distance = (p - q).abs().sum() * (0.5 if fault == "halved" else 1.0)
            cross_entropy = -q[ids.index(token)].log() if terms.targets == "tokens" else -p @ q.log()
            state = chain[k].normed[place][:HIDDEN]
            before = w1[int(batch.next_tokens[row, k])]
            reads = torch.cat([state, before]) if drafter.config.confidence_head_with_markov else state
            c = torch.sigmoid(proj.weight[0] @ reads + proj.bias[0])
            target = 1 - 0.5 * (p - q).abs().sum()
            target = target if fault == "target not detached" else target.detach()
            confidence = -(target * c.log() + (1 - target) * (1 - c).log())
            each = terms.token_weight * cross_entropy + terms.variation_weight * distance
            each = each + terms.confidence_weight * confidence
            sums[k] = sums[k] + weight * each
            counts[k] += weight
    return sum(decay**k * total / max(1, counts[k]) for k, total in enumerate(sums))  # type: ignore[return-value]


def loss_of(drafter: DSparkDrafter, head: torch.Tensor, terms: LossTerms, **options: Any) -> BlockLoss:
    steps = steps_of(drafter)
    return BlockLoss(
        drafter,
        teacher_norm=nn.Identity(),
        teacher_head=head,
        ttt_steps=steps,
        ttt_loss_decay=math.exp(-1 / 4),
        terms=terms,
        **options,
    )


def make_case(**changes: Any) -> tuple[DSparkDrafter, Batch, torch.Tensor]:
    drafter = make_drafter(**changes)
    packed = pack(DOCUMENTS, steps=steps_of(drafter)).with_layers([0, 1, 2], 2)
    weights = packed.loss_weights * (torch.arange(len(packed.positions)) % 5 == 0)[:, None]
    return drafter, replace(packed, loss_weights=weights), torch.randn(DRAFT, HIDDEN, dtype=torch.float64)


TERMS = {
    "published": PUBLISHED,
    "distribution": PUBLISHED | {"targets": "distribution"},
    "without variation": PUBLISHED | {"variation_weight": 0.0},
    "without tokens": {"token_weight": 0.0, "variation_weight": 1.0, "confidence_weight": 0.0},
    "without confidence": PUBLISHED | {"confidence_weight": 0.0},
    "all rows of a block": PUBLISHED | {"supervised_prefix": False},
    "cross-entropy alone": {"supervised_prefix": True},
}


def compare_loss(case: tuple[DSparkDrafter, Batch, torch.Tensor], terms: LossTerms, *, fault: str = "") -> None:
    """Value and gradients; `fault` is one of the formulas'."""
    drafter, batch, head = case
    loss = loss_of(drafter, head, terms)
    output, expected = loss(batch), plain_loss(drafter, batch, head, terms, math.exp(-1 / 4), fault=fault)
    parameters = [p for n, p in drafter.named_parameters() if terms.confidence_weight or "confidence" not in n]
    found, wanted = (torch.autograd.grad(x, parameters, retain_graph=True) for x in (output.loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(output.loss, expected, rtol=1e-9, atol=1e-9)
    # A step's micro-batches share its divisors.
    torch.testing.assert_close(loss(batch, 2 * loss.weights(batch)).loss, expected / 2, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("name", TERMS)
def test_loss(name: str, from_anchor: bool, with_markov: bool) -> None:
    """With tokens outside the draft vocabulary."""
    terms = LossTerms(in_blocks=True, **{"targets": "tokens"} | TERMS[name])  # type: ignore[arg-type]
    compare_loss(make_case(from_anchor=from_anchor, with_markov=with_markov), terms)


@pytest.mark.parametrize("subset", [None, DRAFT - 1])
@pytest.mark.parametrize("name", ["published", "cross-entropy alone"])
def test_a_frozen_head_changes_no_other_gradient(name: str, subset: int | None) -> None:
    """What the Markov head and the layers learn, with the gradient of the vocabulary head left out and not."""
    drafter, batch, head = make_case()
    terms = LossTerms(targets="tokens", in_blocks=True, **TERMS[name])  # type: ignore[arg-type]
    loss, found = loss_of(drafter, head, terms, loss_vocab_size=subset), []
    others = {n: p for n, p in drafter.named_parameters() if "lm_head" not in n}
    for trained in (True, False):
        drafter.lm_head.requires_grad_(trained)
        torch.manual_seed(0)  # for the tokens that are drawn
        drafter.zero_grad()
        loss(batch).loss.backward()
        found.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in others.items()})
    assert drafter.lm_head.weight.grad is None
    assert found[1]["markov_head.markov_w2.weight"].any()
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fault", ["halved", "teacher late", "no prefix", "target not detached"])
def test_the_loss_s_comparison_would_notice(fault: str) -> None:
    terms = LossTerms(targets="tokens", in_blocks=True, **PUBLISHED)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="not close"):
        compare_loss(make_case(), terms, fault=fault)


@pytest.mark.parametrize("targets", ["tokens", "distribution"])
def test_a_subset_estimates_the_whole(targets: str) -> None:
    drafter = make_drafter(vocab_size=MANY, draft_vocab_size=MANY)
    drafter.draft_token_ids = torch.arange(MANY)
    terms = LossTerms(in_blocks=True, **PUBLISHED | {"targets": targets, "token_weight": 1.0})  # type: ignore[arg-type]
    loss = loss_of(drafter, torch.randn(MANY, HIDDEN, dtype=torch.float64), terms)
    compare_subset_with_whole(loss, pack(DOCUMENTS, steps=steps_of(drafter)).with_layers([0, 1, 2], 2))


def test_options() -> None:
    options = DSparkOptions(sample_from_anchor=True, enable_confidence_head=True, block_size=7, passes=3.5, **PUBLISHED)  # type: ignore[arg-type]
    assert (options.max_draft_tokens, options.share_of_positions) == (7, 0.5)
    assert make_drafter().loss_terms(options) == LossTerms(
        targets="tokens",
        in_blocks=True,
        acceptance_alpha=0.5,
        **PUBLISHED,  # type: ignore[arg-type]
    )
    assert make_drafter().loss_terms(DSparkOptions()).confidence_weight == 0, "no head, nothing to weigh"
    assert DSparkOptions().max_draft_tokens == 7
    with pytest.raises(ValueError, match="would learn nothing"):
        DSparkOptions(token_weight=0)
    with pytest.raises(ValueError, match="the confidence head would stay untrained"):
        DSparkOptions(enable_confidence_head=True, confidence_weight=0)


@pytest.mark.parametrize("loss", ["kl", "total_variation"])
@pytest.mark.parametrize("terms", [{"variation_weight": 0.9}, {"enable_confidence_head": True}])
def test_a_loss_that_the_terms_replace_is_refused(terms: dict[str, Any], loss: str) -> None:
    drafter = {"kind": "dspark", "targets": "distribution"}
    with pytest.raises(ValueError, match=rf"`loss: {loss}` would do nothing.*set `variation_weight`"):
        TrainConfig(drafter=drafter | terms, loss=loss)  # type: ignore[arg-type]
    assert TrainConfig(drafter=drafter | terms)  # type: ignore[arg-type]
    assert TrainConfig(drafter=drafter, loss=loss)  # type: ignore[arg-type]


# ---- serving ----


@torch.no_grad()
@pytest.mark.parametrize("steps", [BLOCK, 3])
@pytest.mark.parametrize("said", [True, None])
def test_the_plugins_proposer_drafts_from_all_rows(said: bool | None, steps: int) -> None:
    """vLLM takes an absent key for true."""
    drafter = make_drafter()
    batch = pack(DOCUMENTS, steps=BLOCK)
    rows = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
    states = drafter.block(batch, rows, steps).flatten(0, 1)
    ids = torch.full((len(rows) + 3, steps), MASK)
    ids[: len(rows), 0] = batch.next_tokens[rows, 0]
    proposer: Any = proposer_v1(Proposer)(Model(drafter), ids.flatten(), steps, from_anchor=said)
    count, places, metadata = proposer.set_inputs_first_pass(len(rows))
    assert (count, metadata) == (len(rows) * steps, f"metadata of {steps} rows each")
    assert places.tolist() == [*range(count)]
    assert proposer.num_speculative_tokens == steps
    found, _ = proposer._sample_draft_tokens(states, None)
    chain = drafter.chain(batch, steps=steps, autoregressive=True)
    expected = torch.stack([drafter.draft_token_ids[F.linear(s.normed, s.head).argmax(-1)] for s in chain], dim=1)
    assert torch.equal(found.view(-1, steps), expected)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drafter = {
        "kind": "dspark", "block_size": 4, "markov_rank": 5, "draft_vocab_size": 60, "sample_from_anchor": True,
        "enable_confidence_head": True, **PUBLISHED,
    }  # fmt: skip
    return make_converted(tmp_path_factory.mktemp("dspark"), drafter, epochs=1)


def test_what_vllm_loads(trained: Path) -> None:
    """vllm/model_executor/models/qwen3_dspark.py."""
    folder = trained / "vllm"
    config = json.loads((folder / "config.json").read_text())
    said = ("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov", "block_size")
    assert [config[name] for name in said] == [True, True, True, 4]
    assert config["dflash_config"]["sample_from_anchor"] is False, "vLLM's V2 refuses another value there"
    found, again = Checkpoint.load(trained / "checkpoint"), read(folder, Found("vllm", "dspark", ""))
    assert again.config == found.config
    hidden = found.config["hidden_size"]
    assert found.tensors["confidence_head.proj.weight"].shape == (1, hidden + 5)
    assert found.tensors["confidence_head.proj.weight"].any(), "it has learned"
    assert found.tensors["confidence_head.proj.bias"].shape == (1,)
    assert all(torch.equal(again.tensors[name], value) for name, value in found.tensors.items())
    assert speculation.speculative_config(folder, 4)["num_speculative_tokens"] == 4
    with pytest.raises(UserError, match="at most 4 tokens, and 5 were requested"):
        speculation.speculative_config(folder, 5)


def test_predicted_for_as_many_tokens_as_rows(trained: Path) -> None:
    figures = Checkpoint.load(trained / "checkpoint").training
    assert [*figures["predicted_acceptance_length"]] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda config: config.pop("sample_from_anchor"), (True, True, True)),
        (lambda config: config.update(sample_from_anchor=False), (False, True, True)),
    ],
)
def test_an_absent_key_means_what_vllm_takes_it_for(
    trained: Path, tmp_path: Path, change: Callable[[dict], None], expected: tuple[bool, ...]
) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((trained / "vllm" / file).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read(tmp_path, Found("vllm", "dspark", "")).config
    names = ("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov")
    assert tuple(found[name] for name in names) == expected
    assert speculation.longest_draft(tmp_path) == (4 if expected[0] else 3)


def test_checkpoints_from_before_these_options() -> None:
    fields = {name: value for name, value in make_drafter().config.to_dict().items() if "anchor" not in name}
    fields = {name: value for name, value in fields.items() if "confidence" not in name}
    config = DSparkConfig.from_dict(fields)
    assert not config.sample_from_anchor
    assert config.max_draft_tokens == BLOCK - 1
    assert "confidence_head.proj.weight" not in DSparkDrafter.shapes(config)
