"""The fused loss against autograd on whole logits, and its memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.target.info import describe_target
from draftsmith.train import loss as loss_module
from draftsmith.train.loss import ChainLoss, row_chunks
from draftsmith.train.packing import pack
from draftsmith.train.setup import make_accelerator, set_up
from tests.unit.test_eagle3 import DRAFT, HIDDEN, make_drafter, make_sequence
from tests.unit.test_kinds import CASES
from tests.unit.tiny_run import make_recipe

STEPS = 3


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns; a view counts by its own elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        # A broadcast dimension has stride 0 and takes no memory.
        sizes = [[n for n, stride in zip(t.shape, t.stride(), strict=True) if stride] for t in tensors]
        self.elements = max([self.elements, *(torch.Size(size).numel() for size in sizes)])
        return result


class Casts(TorchDispatchMode):
    """Shapes of the tensors that are copied to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **kwargs or {})


def make_loss(drafter: Drafter | None = None, **options: object) -> ChainLoss:
    drafter = drafter or make_drafter()
    torch.manual_seed(3)
    head = torch.randn(drafter.config.draft_vocab_size, HIDDEN, dtype=torch.float64)
    norm = torch.nn.RMSNorm(HIDDEN, eps=1e-5).double()
    return ChainLoss(drafter, teacher_norm=norm, teacher_head=head, ttt_steps=STEPS, ttt_loss_decay=0.8, **options)  # type: ignore[arg-type]


def make_batch() -> Batch:
    """Prompts of four, three and no tokens; at the start of the last sequence late steps have no draft to supervise."""
    sequences = [make_sequence(11, 4, 1), make_sequence(8, 3, 2), make_sequence(9, 0, 3)]
    batch = pack(sequences, steps=STEPS, prompt_weight=0.3)
    generator = torch.Generator().manual_seed(4)
    return replace(
        batch, last_states=torch.randn(len(batch.positions), HIDDEN, generator=generator, dtype=torch.float64)
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_LEAST_ROWS", 4)
    monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE", 1)


def plain_loss(loss: ChainLoss, batch: Batch, divisors: torch.Tensor | None) -> torch.Tensor:
    """By the formulas, on whole logits, row by row."""
    known = {int(token): i for i, token in enumerate(loss.drafter.draft_token_ids)}
    teacher = F.linear(loss.teacher_norm(batch.last_states), loss.teacher_head).softmax(-1)
    rows = batch.loss_weights.sum(1).nonzero()[:, 0].tolist()
    total = torch.zeros((), dtype=torch.float64)
    for k, step in enumerate(loss.drafter.chain(batch, steps=STEPS)):
        log_q = F.linear(step.normed, step.head).log_softmax(-1)
        each, weights = [], []
        for i, row in enumerate(rows):
            if batch.loss_weights[row, k] > 0 and int(batch.next_tokens[row, k + 1]) in known:
                p = teacher[row + 1 + k]
                each.append(
                    {
                        "cross_entropy": -(p * log_q[i]).sum(),
                        "kl": (p * (p.log() - log_q[i])).sum(),
                        "total_variation": (p - log_q[i].exp()).abs().sum() / 2,
                    }[loss.loss]
                )
                weights.append(batch.loss_weights[row, k].double())
        divisor = torch.stack(weights).sum() if divisors is None else divisors[k]
        total = total + 0.8**k * (torch.stack(each) * torch.stack(weights)).sum() / divisor
    return total


@pytest.mark.parametrize("name", ["cross_entropy", "kl", "total_variation"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("left_out", [True, False])
def test_loss_and_gradients_equal_plain_autograd(
    name: str, trained: bool, left_out: bool, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without the rows that a step is not trained for."""
    monkeypatch.setattr(loss_module, "_SPARSE", float(left_out))
    batch = make_batch()
    loss = make_loss(loss=name)
    loss.drafter.lm_head.requires_grad_(trained)
    divisors = torch.tensor([40.0, 30.0, 20.0])
    for given in (None, divisors):
        outcomes = []
        for value in (loss(batch, given).loss, plain_loss(loss, batch, given)):
            loss.zero_grad()
            (3 * value).backward()  # what comes after the loss scales the gradients
            outcomes.append((value.detach(), *(p.grad for p in loss.drafter.parameters() if p.requires_grad)))
        for found, expected in zip(*outcomes, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_kl_is_cross_entropy_less_the_targets_entropy() -> None:
    batch = make_batch()
    gradients = []
    for name in ("cross_entropy", "kl"):
        loss = make_loss(loss=name)
        loss(batch).loss.backward()
        gradients.append(loss.drafter.fc.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_divisors_are_the_sums_of_weights_unless_given() -> None:
    batch = make_batch()
    loss = make_loss()
    weights = loss.weights(batch)
    labels = loss.to_draft[batch.next_tokens[:, 1:]]
    torch.testing.assert_close(weights, (batch.loss_weights.double() * (labels >= 0)).sum(0))
    whole = loss(batch)
    torch.testing.assert_close(loss(batch, weights).loss, whole.loss)
    torch.testing.assert_close(loss(batch, weights * 2).loss, whole.loss / 2)


def test_matches_are_top_1_accuracy() -> None:
    batch = make_batch()
    loss = make_loss()
    ids = loss.drafter.draft_token_ids
    rows = batch.loss_weights.sum(1) > 0
    expected = []
    for k, step in enumerate(loss.drafter.chain(batch, steps=STEPS)):
        right = ids[F.linear(step.normed, step.head).argmax(-1)] == batch.next_tokens[rows, k + 1]
        counts = step.loss_weights.double()
        expected.append((right * counts).sum() / counts.sum())
    torch.testing.assert_close(loss(batch).matches, torch.stack(expected))


def subset_of(loss: ChainLoss, batch: Batch) -> loss_module._VocabularySubset:
    alignment = loss._align(batch)
    steps = list(loss.drafter.chain(batch, steps=STEPS))
    normed = [step.normed[drafts] for step, drafts in zip(steps, alignment.drafts, strict=True)]
    subset = loss._subset(
        loss.teacher_norm(batch.last_states[alignment.rows]), normed, [step.head for step in steps], alignment
    )
    assert subset is not None
    return subset


def test_a_subset_of_the_vocabulary(small_chunks: None) -> None:
    batch = make_batch()
    whole = make_loss()(batch).loss
    # The whole vocabulary as subset changes nothing. A proper subset has every true token, even if they exceed its size.
    torch.testing.assert_close(make_loss(loss_vocab_size=DRAFT)(batch).loss, whole)
    loss = make_loss(loss_vocab_size=25)
    true = set(loss._align(batch).labels.tolist())
    torch.manual_seed(0)
    subset = subset_of(loss, batch)
    assert len(subset.columns.unique()) == len(subset.columns) == 25
    assert subset.kept < 25
    assert true < set(subset.columns[: subset.kept].tolist())
    torch.manual_seed(0)
    loss(batch).loss.backward()
    untouched = sorted({*range(DRAFT)} - {*subset.columns.tolist()})
    assert not loss.drafter.lm_head.weight.grad[untouched].any()
    assert loss.drafter.lm_head.weight.grad[subset.columns].any(1).all()
    loss.loss_vocab_size = 2
    assert set(subset_of(loss, batch).columns.tolist()) == true


def test_a_subset_is_the_whole_where_every_token_is_a_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a small draft vocabulary and large steps: there is nothing left to draw from."""
    batch, loss = make_batch(), make_loss(loss_vocab_size=DRAFT // 2)
    alignment = loss._align(batch)
    every = replace(alignment, labels=torch.arange(DRAFT).repeat(1 + len(alignment.labels) // DRAFT))
    monkeypatch.setattr(loss, "_align", lambda _: every)
    with pytest.raises(AssertionError):  # there is none
        subset_of(loss, batch)


MANY = 400
"""Size of a draft vocabulary that the loss takes subsets of."""


def make_wide_loss(**options: object) -> ChainLoss:
    drafter = make_drafter(vocab_size=MANY, draft_vocab_size=MANY)
    drafter.draft_token_ids = torch.arange(MANY)
    return make_loss(drafter, **options)


@pytest.mark.parametrize("name", ["cross_entropy", "kl", "total_variation"])
def test_a_subset_estimates_the_whole(name: str) -> None:
    """Mean loss and gradient over many draws are those of the whole vocabulary, up to a small bias."""
    batch = make_batch()
    losses, gradients = [], []
    for size, draws in ((None, 1), (240, 60)):
        found, gradient = 0.0, torch.zeros(())
        for draw in range(draws):
            loss = make_wide_loss(loss=name, loss_vocab_size=size)
            torch.manual_seed(draw)
            value = loss(batch).loss
            value.backward()
            found, gradient = found + value.item() / draws, gradient + loss.drafter.lm_head.weight.grad / draws
        losses.append(found)
        gradients.append(gradient)
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert F.cosine_similarity(gradients[0].flatten(), gradients[1].flatten(), dim=0) > 0.97
    assert 0.9 < gradients[1].norm() / gradients[0].norm() < 1.1


def test_a_subset_is_of_the_tokens_that_are_likely_under_the_soft_cap() -> None:
    """Some tokens are likely in one row each, far above others that are likely in all rows. Under a low cap both are as likely where they
    are, so those of all rows matter more."""
    batch = make_batch()
    batch = replace(batch, last_states=torch.eye(HIDDEN).double()[torch.arange(len(batch.positions)) % HIDDEN])
    for soft_cap in (1.0, None):
        loss = make_wide_loss(teacher_soft_cap=soft_cap)
        loss.teacher_norm = torch.nn.Identity()
        loss.drafter.lm_head.weight.data.zero_()  # to the drafter all are as likely
        true = set(loss._align(batch).labels.tolist())
        tokens = [token for token in range(MANY) if token not in true]
        everywhere, once = tokens[:20], tokens[20 : 20 + HIDDEN]
        loss.teacher_head.zero_()
        loss.teacher_head[everywhere] = 90
        loss.teacher_head[once, torch.arange(HIDDEN)] = 100
        loss.loss_vocab_size = (len(true) + 20) * 6 // 5
        subset = subset_of(loss, batch)
        assert subset.kept == len(true) + 20
        assert (set(subset.columns[: subset.kept].tolist()) == true | {*everywhere}) == (soft_cap is not None)


def test_tokens_that_only_the_drafter_finds_likely_are_pushed_down() -> None:
    """A drafter that gives most of its probability to tokens that the teacher all but rules out."""
    batch = make_batch()
    batch = replace(batch, last_states=batch.last_states.abs() + 0.1)
    losses, pushes = [], []
    for size in (None, 64):
        loss = make_wide_loss(loss_vocab_size=size)
        true = set(loss._align(batch).labels.tolist())
        wrong = [token for token in range(MANY) if token not in true][:20]
        loss.teacher_head[wrong] = -5  # far from every state
        with torch.no_grad():
            normed = torch.cat([step.normed for step in loss.drafter.chain(batch, steps=STEPS)])
            loss.drafter.lm_head.weight[wrong] = 8 * normed.mean(0) / normed.mean(0).norm()
            assert (normed @ loss.drafter.lm_head.weight.T).softmax(-1)[:, wrong].sum(1).mean() > 0.3
        torch.manual_seed(0)
        value = loss(batch).loss
        value.backward()
        losses.append(value.item())
        pushes.append(loss.drafter.lm_head.weight.grad[wrong].sum(0))
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert (pushes[1] - pushes[0]).norm() < 0.1 * pushes[0].norm(), "as hard as by the whole vocabulary"


def test_the_same_draw_makes_the_same_loss() -> None:
    """The trainer seeds each step, so a resumed run draws the same as an uninterrupted one."""
    batch = make_batch()
    loss = make_wide_loss(loss_vocab_size=100)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(loss(batch).loss.item())
    assert found[0] == found[1] != found[2]


def test_products_follow_autocast() -> None:
    batch = make_batch()
    loss = make_loss().float()
    batch = batch.to_dtype(torch.float32)
    exact = loss(batch).loss
    exact.backward()
    wanted = loss.drafter.lm_head.weight.grad.clone()
    loss.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rough = loss(batch).loss
    rough.backward()
    assert rough.dtype == loss.drafter.lm_head.weight.grad.dtype == torch.float32
    assert 0 < (rough - exact).abs() < 0.02 * exact
    torch.testing.assert_close(loss.drafter.lm_head.weight.grad, wanted, rtol=0.1, atol=0.02)


def test_a_batch_without_weights_has_no_loss() -> None:
    loss = make_loss()
    sequence = make_sequence(9, 4, 1)
    silent = Sequence(1, False, sequence.token_ids, torch.zeros(9, dtype=torch.bool), sequence.hidden_states)
    batch = replace(pack([silent], steps=STEPS), last_states=torch.randn(8, HIDDEN, dtype=torch.float64))
    found = loss(batch)
    found.loss.backward()
    assert float(found.loss) == 0
    assert loss.weights(batch).tolist() == found.matches.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("single_thread")
def test_every_weight_has_a_gradient_where_little_or_nothing_is_trained(folder: Path, name: str) -> None:
    """DDP and FSDP wait for those of every process."""
    recipe, store = make_recipe(folder, **CASES[name][0]), Store(folder / "run" / "store")
    accelerator, target = make_accelerator(recipe, folder), describe_target(folder / "target")
    run = set_up(recipe, accelerator, target, store, None, directory=folder, inputs="")
    batch = run.data.on_device(run.data.batch([0]))
    nothing = torch.zeros_like(batch.loss_weights)
    one_token = nothing.clone()
    one_token[8, 0] = 1
    for weights in (nothing, one_token):
        run.loss.zero_grad()
        run.loss(replace(batch, loss_weights=weights)).loss.backward()
        trained = {key: weight for key, weight in run.loss.named_parameters() if weight.requires_grad}
        assert [key for key, weight in trained.items() if weight.grad is None] == []
        assert any(weight.grad.any() for weight in trained.values() if weight.grad is not None) == bool(weights.any())


def test_the_launchers_compiler_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it accelerate would compile the whole loss, and make float32 products TF32 on a GPU."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
    try:
        found = make_accelerator(make_recipe(folder), folder).state.dynamo_plugin
        assert found.backend == DynamoBackend.NO
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_logits_of_all_rows_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_LEAST_ROWS", 64)
    monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE", 1)
    vocab = 3000
    batch = pack([make_sequence(90, 2, seed) for seed in range(5)], steps=STEPS)
    last_states = torch.randn(len(batch.positions), HIDDEN, dtype=torch.float64)
    batch = replace(batch, last_states=last_states)
    for options in ({}, {"loss_vocab_size": 2000}, {"loss": "total_variation"}):
        drafter = make_drafter(vocab_size=vocab, draft_vocab_size=vocab)
        drafter.draft_token_ids = torch.arange(vocab)
        loss = make_loss(drafter, **options)
        with LargestTensor() as largest:
            loss(batch).loss.backward()
        assert largest.elements < int(batch.loss_weights[:, 0].sum()) * 2000 / 4
    with LargestTensor() as largest:
        F.linear(last_states, loss.teacher_head)
    assert largest.elements == len(last_states) * vocab, "what it would be otherwise"


def test_row_chunks() -> None:
    def sizes(rows: int, vocab: int, device: str = "cpu") -> Iterator[int]:
        return (chunk.stop - chunk.start for chunk in row_chunks(rows, vocab, device))

    at_once = loss_module._LOGITS_AT_ONCE
    assert list(sizes(1000, at_once // 400)) == [400, 400, 200]
    assert list(sizes(loss_module._LEAST_ROWS + 1, at_once)) == [loss_module._LEAST_ROWS, 1]
    assert list(sizes(0, 10)) == []
    assert list(sizes(4096, 32_000, "cuda")) == [4096], "a batch of a micro-batch's size at once"
    assert next(iter(sizes(10_000, 128_000, "cuda"))) == 1048


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpus_chunks_make_the_same_loss(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in one chunk, as on a GPU, and in chunks of four."""
    batch = make_batch().to_dtype(torch.float32)
    outcomes = []
    chunks_of = loss_module.row_chunks
    for device, least in (("cpu", 4), ("cuda", 128)):
        monkeypatch.setattr(loss_module, "_LEAST_ROWS", least)
        monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE", 1)
        monkeypatch.setattr(
            loss_module, "row_chunks", lambda rows, vocab, _, device=device: chunks_of(rows, vocab, device)
        )
        loss = make_loss().float()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            value = loss(batch).loss
        value.backward()
        outcomes.append((value.detach(), loss.drafter.lm_head.weight.grad, loss.drafter.fc.weight.grad))
    # Rows are equal in any chunk. Only the order of sums over rows differs, and in bf16 the sum of each chunk is rounded.
    tolerance = 1e-5 if precision == "float32" else 2e-2
    for found, expected in zip(*outcomes, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_torch_finds_the_loss_in_what_is_returned() -> None:
    """FSDP2 reduces gradients from a hook on the tensors there, which before torch 2.12 it looks for by this alone."""
    found = make_loss()(make_batch())
    assert any(leaf is found.loss for leaf in tree_leaves(found))


@pytest.mark.parametrize("name", ["cross_entropy", "kl", "total_variation"])
def test_a_subset_in_bfloat16(name: str) -> None:
    """Products as in training on a GPU, with the log weights of the drawn tokens."""
    batch = make_batch().to_dtype(torch.float32)
    outcomes = []
    for enabled in (False, True):
        loss = make_wide_loss(loss=name, loss_vocab_size=240).float()
        # The same subset for both: a rounded probability may choose another.
        torch.manual_seed(0)
        subset = subset_of(loss, batch)
        loss._subset = lambda *_, subset=subset: subset
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = loss(batch).loss
        value.backward()
        outcomes.append((value.detach(), loss.drafter.lm_head.weight.grad))
    (exact, wanted), (rough, found) = outcomes
    assert 0 < (rough - exact).abs() < 0.02 * exact
    assert F.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.98


def head_loss(patch: pytest.MonkeyPatch, *, autocast: bool, keeps_sums: bool) -> list[torch.Tensor]:
    """The loss, the probabilities of the labels, and the loss's gradients for logits of about 20, whose inputs bfloat16 does not round."""
    generator = torch.Generator().manual_seed(0)
    states, normed, head = (torch.randn(*shape, generator=generator) for shape in ((30, 24), (30, 24), (200, 24)))
    states, normed, head = (each.bfloat16().float() for each in (states, normed, 4 * head))
    normed.requires_grad_()
    head.requires_grad_()
    subset = loss_module._VocabularySubset(torch.arange(200), 150, torch.linspace(0, 2, 200).bfloat16().float())
    targets = loss_module._LossTargets(torch.arange(30), subset, states, head.detach())
    with patch.context() as patched, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patched.setattr(loss_module, "_keeps_sums", lambda dtype, device: keeps_sums)
        if keeps_sums:  # no CPU does; so by hand

            def mm(x: torch.Tensor, y: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
                assert x.dtype == y.dtype, "CUDA refuses others"
                return x.to(out_dtype) @ y.to(out_dtype)

            patched.setattr(loss_module.torch, "mm", mm)
        total, _, _ = loss_module._HeadLoss.apply(
            "cross_entropy", targets, torch.ones(1, 30), [None], [0], 0, normed, head
        )
        likely = loss_module._label_probabilities(normed, head, targets)
    total.backward()
    return [total.detach(), likely, normed.grad, head.grad]


@pytest.mark.parametrize("keeps_sums", [True, False])
def test_logits_in_bfloat16_are_not_rounded(keeps_sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their inputs are; the sums are float32's, on GPUs by a product that returns them and elsewhere by a product in float32."""
    exact, probable, *wanted = head_loss(monkeypatch, autocast=False, keeps_sums=False)
    found, likely, *gradients = head_loss(monkeypatch, autocast=True, keeps_sums=keeps_sums)
    assert abs(found - exact) < 1e-6 * exact
    torch.testing.assert_close(likely, probable, rtol=1e-5, atol=0)
    for one, other in zip(gradients, wanted, strict=True):
        assert 0 < (one - other).norm() < 0.01 * other.norm(), "of rounded inputs"


def test_a_head_is_cast_once_where_products_return_float32s_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a GPU's head takes a gigabyte where the vocabulary is large."""
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts, monkeypatch.context() as patch:
        patch.setattr(loss_module, "_keeps_sums", lambda dtype, device: True)
        patch.setattr(loss_module, "_logits", lambda x, head, *rest: F.linear(x, head).float())
        head = torch.randn(200, 24)
        targets = loss_module._LossTargets(torch.arange(30), None)
        loss_module._HeadLoss.apply(
            "cross_entropy", targets, torch.ones(1, 30), [None], [0], 0, torch.randn(30, 24), head
        )
    assert casts.shapes.count((200, 24)) == 1


def test_a_cpu_rounds_products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not loss_module._keeps_sums(torch.bfloat16, "cpu")
    assert loss_module._logit_inputs(torch.bfloat16, "cpu") == torch.float32
    assert loss_module._logit_inputs(torch.float64, "cpu") == torch.float64
    # Devices that return float32: of rounded sums, or of sums.
    mm = torch.mm
    for dtype, sums in ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)):
        loss_module._keeps_sums.cache_clear()
        between = torch.float32 if sums else dtype

        def product(
            x: torch.Tensor, y: torch.Tensor, *, out_dtype: torch.dtype, between: torch.dtype = between
        ) -> torch.Tensor:
            return mm(x.to(between), y.to(between)).to(out_dtype)

        monkeypatch.setattr(torch, "mm", product)
        assert loss_module._keeps_sums(dtype, "cpu") == sums
    loss_module._keeps_sums.cache_clear()
