"""How fast drafters train: against what limits it, a direct implementation, and speculators.

`training_step`: one step at SmolLM2-135M's shapes, all takers in turn in one run, on the same tensors: 1,024 rows in 5
documents, of which 30% are prompt, as in ShareGPT, and count as in `recipes/learn.yaml`; 3 fused states, draft vocabulary
8192, 3 chain steps. Loading is outside the clock for all.

- Ours is what the trainer does for a step of `recipes/learn.yaml`: its loss, clipping, its optimizers.
- The limit is the rate of one plain matrix product. Our useful operations are counted from the formulas, for the rows that
  the loss needs: two for each weight a row meets forward, twice that backward, none for the gradient of a frozen head; the
  head and the teacher over the part of the draft vocabulary that the loss is taken over, both over all of it for the rows
  that choose the part; and the products of Muon's iteration (in float32 on Gram matrices, of which
  half is computed). Attention, norms and softmax are not counted.
- A direct implementation (`reference_eagle3.py`) with AdamW, and speculators' model with its own optimizer (`peer_driver.py`), do what they
  do for all rows.

Where the processor has arithmetic for bfloat16, in which a recipe then trains by default, all are measured once more in it: ours with
autocast and with Muon in it, the direct implementation with autocast, speculators' as its own trainer does, and the plain product. These
figures have `bfloat16` in their names.

`training_step_p_eagle`, `training_step_dflash`, `training_step_dspark`: the same for the drafters of `recipes/smollm2-KIND.yaml`,
against speculators' of the same size, which draws as many blocks and the same shares of later draft tokens. Useful operations are
counted by `Drafter.matmul_counts`, and attention with them.

`time_to_peer`: training to the same acceptance on the store of `recipes/learn.yaml`.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from draftsmith.cli.plan_training import flop_of_muon, trained_parameters
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.config.training import TrainConfig
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.norm import FinalNorm
from draftsmith.run.cuda import native_bfloat16
from draftsmith.run.process import disable_malloc_trim
from draftsmith.store.format import Sequence
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train import epochs as epoch_end
from draftsmith.train import train
from draftsmith.train.loss import ROWS_ASKED, BlockLoss, ChainLoss
from draftsmith.train.optimizers import make_optimizers
from draftsmith.train.packing import pack
from tests.benchmarks import bench_learn
from tests.benchmarks.figures import Figure, figure
from tests.benchmarks.peer_speculators import hand_over, stepping
from tests.benchmarks.reference_eagle3 import (
    DRAFT,
    FUSED,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    STEPS,
    VOCAB,
    ReferenceEagle3,
)
from tests.benchmarks.sweep import length

ROUNDS, ROWS, DOCUMENTS, PROMPT = 12, 1024, 5, 61
MATMUL = (1024, 1536, 1536)
PRODUCTS = 20
"""Matrix products between two looks at the clock."""
Precision = Literal["float32", "bfloat16"]


def training_step() -> dict[str, Figure]:
    """`train.tokens_per_second`, `train.matmul_fraction`, `train.reference_ratio` and `train.peer_ratio`, and these of `train.bfloat16`."""
    return {name: found for precision in _precisions() for name, found in _eagle3_step_in(precision).items()}


def _eagle3_step_in(precision: Precision) -> dict[str, Figure]:
    torch.manual_seed(0)
    target = bench_learn.learn_target()
    layers = target.num_hidden_layers
    saved = (2, layers // 2, layers - 3, layers)
    sequences = _sequences(len(saved))
    ours, operations = _ours(sequences, precision)
    reference = _reference(sequences, precision)
    with (
        tempfile.TemporaryDirectory() as folder,
        stepping(hand_over(target, saved, torch.arange(DRAFT)), sequences, Path(folder), precision) as peer,
    ):
        times = _in_turns(
            {"ours": lambda: _seconds(ours), "reference": lambda: _seconds(reference), "peer": peer}, precision
        )
    prefix = "train" if precision == "float32" else "train.bfloat16"
    figures = _figures(prefix, times, operations, fraction_bar=0.70)
    runs = [theirs / mine for mine, theirs in zip(times["ours"], times["reference"], strict=True)]
    rate = ROWS / statistics.median(times["reference"])
    figures[f"{prefix}.reference_ratio"] = figure(
        runs, "ratio", f"a direct implementation's step: {rate:.0f} tokens/s", direction="higher", bar=1.5
    )
    return figures


def training_step_p_eagle() -> dict[str, Figure]:
    """`train.p_eagle.tokens_per_second`, `.matmul_fraction` and `.peer_ratio`, and these of `train.p_eagle.bfloat16`."""
    return _step_of("p_eagle")


def training_step_dflash() -> dict[str, Figure]:
    """`train.dflash.tokens_per_second`, `.matmul_fraction` and `.peer_ratio`, and these of `train.dflash.bfloat16`."""
    return _step_of("dflash")


def training_step_dspark() -> dict[str, Figure]:
    """`train.dspark.tokens_per_second`, `.matmul_fraction` and `.peer_ratio`, and these of `train.dspark.bfloat16`."""
    return _step_of("dspark")


def _precisions() -> tuple[Precision, ...]:
    return ("float32", "bfloat16") if native_bfloat16("cpu") else ("float32",)


def _step_of(kind: str) -> dict[str, Figure]:
    return {name: found for precision in _precisions() for name, found in _step_in(kind, precision).items()}


def _step_in(kind: str, precision: Precision) -> dict[str, Figure]:
    torch.manual_seed(0)
    recipe, target = bench_learn.learn_recipe(kind), bench_learn.learn_target()
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
    layers = target.num_hidden_layers
    saved = (2, layers // 2, layers - 3, layers)
    vocabulary = torch.arange(recipe.train.drafter.draft_vocab_size or target.vocab_size)
    sequences = _sequences(len(saved))
    ours, operations = step_of_kind(recipe, target, sequences, vocabulary)
    handed = hand_over(target, saved, vocabulary, options=recipe.train.drafter)
    with tempfile.TemporaryDirectory() as folder, stepping(handed, sequences, Path(folder), precision) as peer:
        times = _in_turns({"ours": lambda: _seconds(ours), "peer": peer}, precision)
    prefix = f"train.{kind}" if precision == "float32" else f"train.{kind}.bfloat16"
    return _figures(prefix, times, operations, fraction_bar=0.65)


def _in_turns(takers: dict[str, Callable[[], float]], precision: Precision) -> dict[str, list[float]]:
    """Seconds of each taker, and of `products` in this precision, in `ROUNDS` rounds, in which they take turns."""
    rows, inner, columns = MATMUL
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)

    def products() -> None:
        for _ in range(PRODUCTS):
            a @ b

    takers = {"products": lambda: _seconds(products), **takers}
    for take in takers.values():  # first calls allocate and choose kernels
        take()
    times: dict[str, list[float]] = {name: [] for name in takers}
    for turn in range(ROUNDS):
        for name in takers if turn % 2 == 0 else reversed(takers):
            times[name].append(takers[name]())
    return times


def _figures(
    prefix: str, times: dict[str, list[float]], operations: float, *, fraction_bar: float
) -> dict[str, Figure]:
    """Of ours, against plain products and the peer."""
    rows, inner, columns = MATMUL
    possible = [PRODUCTS * 2 * rows * inner * columns / seconds for seconds in times["products"]]
    fractions = [operations / seconds / most for seconds, most in zip(times["ours"], possible, strict=True)]
    ratios = [theirs / mine for mine, theirs in zip(times["ours"], times["peer"], strict=True)]
    rate, peers = statistics.median(possible) / 1e9, ROWS / statistics.median(times["peer"])
    muon = "bfloat16, as its trainer does" if prefix.endswith("bfloat16") else "Muon in float32"
    return {
        f"{prefix}.tokens_per_second": figure(
            [ROWS / one for one in times["ours"]], "tokens/s", "nothing; noisy machine", direction="higher"
        ),
        f"{prefix}.matmul_fraction": figure(
            fractions, "ratio", f"one {list(MATMUL)} product: {rate:.0f} GFLOP/s", direction="higher", bar=fraction_bar
        ),
        f"{prefix}.peer_ratio": figure(
            ratios, "ratio", f"speculators' model and optimizer, {muon}: {peers:.0f} tokens/s", direction="higher", bar=1.5
        ),
    }  # fmt: skip


def time_to_peer() -> dict[str, Figure]:
    """`train.time_to_peer_ratio`: wall time of one fixed training of ours over that in which speculators' drafter reaches what it
    does at its best; `train.time_to_peer_length`: acceptance length that ours then has, which must be the peer's.

    Ours is a whole run of `recipes/learn.yaml` over half as many epochs, with the schedule that goes with them: nothing of it
    was chosen by what came out. The peer has the settings that the sweep of `learning_eagle3` chose, and its time is that of
    its best epoch. Acceptance is on the report part. On both sides building the model, the start from the target's weights
    and loading count; evaluation does not.
    """
    recipe, target, text = bench_learn.learn_recipe("eagle3"), bench_learn.learn_target(), bench_learn.learn_text()
    best, settings = bench_learn.tuned_peer(recipe, text)
    again = bench_learn.peer_outcome(
        recipe,
        target,
        text,
        bench_learn.peer_vocabulary(recipe, target, text.store),
        lr=best.more["lr"],
        layer_ids=tuple(best.more["layer_ids"]),
        epochs=best.more["epochs"],
        fresh=True,
    )
    theirs, their_seconds = length(best.reported), again.more["seconds"][best.epoch - 1]
    ours, seconds = _timed_training(recipe.train.epochs / 2, text)
    against = f"speculators ({settings}): {theirs:.3f} in {their_seconds:.0f} s; ours: {ours:.3f} in {seconds:.0f} s"
    return {
        "train.time_to_peer_ratio": figure([seconds / their_seconds], "ratio", against, direction="lower", bar=0.5),
        "train.time_to_peer_length": figure(
            [ours], f"tokens a step, K = {bench_learn.POSITIONS}", against, direction="higher", bar=round(theirs, 4)
        ),
    }


def _timed_training(epochs: float, text: bench_learn.Text) -> tuple[float, float]:
    """Acceptance length on the report part after a training of this many epochs, and its seconds without evaluation."""
    evaluation = 0.0

    def evaluate(*arguments: Any, **named: Any) -> dict[int, float]:
        nonlocal evaluation
        begun = time.perf_counter()
        found = predict(*arguments, **named)
        evaluation += time.perf_counter() - begun
        return found

    def timed_run(*arguments: Any, **named: Any) -> dict[str, Any]:
        nonlocal seconds
        begun = time.perf_counter()
        found = train.run_train(*arguments, **named)
        seconds = time.perf_counter() - begun - evaluation
        return found

    predict, seconds = epoch_end.predict_acceptance, 0.0
    shortened = load_recipe(bench_learn.RECIPES / "learn.yaml", [f"train.epochs={epochs}"])
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(epoch_end, "predict_acceptance", evaluate),
        mock.patch.object(bench_learn, "run_train", timed_run),
    ):
        return length(bench_learn.train_ours(shortened, text, Path(folder))), seconds


# ---- the steps ----


def _sequences(states: int) -> list[Sequence]:
    """`ROWS` rows of random tokens and states in `DOCUMENTS` documents of nearly one length."""
    sequences = []
    for number, rows in enumerate(len(part) for part in torch.arange(ROWS).chunk(DOCUMENTS)):
        ids = torch.randint(0, DRAFT, (rows + 1,), dtype=torch.int32)
        sequences.append(
            Sequence(number, False, ids, torch.arange(rows + 1) >= PROMPT, torch.randn(rows, states, HIDDEN))
        )
    return sequences


def _ours(sequences: list[Sequence], precision: Precision) -> tuple[Callable[[], None], float]:
    """The trainer's step on these sequences, and the operations that it needs."""
    disable_malloc_trim()
    recipe = load_recipe(bench_learn.RECIPES / "learn.yaml", [f"train.precision={precision}"])
    options = recipe.train
    config = Eagle3Config(
        layer_ids=tuple(range(FUSED)),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=2048,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT,
        norm_before_residual=False,
        fc_norm=True,
        norm_output=False,
    )
    drafter = Eagle3Drafter(config, torch.randn(VOCAB, HIDDEN), torch.arange(DRAFT))
    drafter.lm_head.requires_grad_(options.train_lm_head)
    loss = ChainLoss(
        drafter,
        teacher_norm=torch.nn.RMSNorm(HIDDEN),
        teacher_head=torch.randn(DRAFT, HIDDEN) / HIDDEN**0.5,
        ttt_steps=STEPS,
        ttt_loss_decay=options.ttt_loss_decay,
        loss=options.loss,
        loss_vocab_size=options.loss_vocab_size,
    )
    packed = pack(sequences, steps=STEPS, prompt_weight=options.prompt_loss_weight)
    batch = packed.with_layers(list(range(FUSED)), FUSED)

    assert not options.train_lm_head  # else the head's own gradient would count too
    operations = useful_operations(batch, loss_vocabulary=options.loss_vocab_size or DRAFT)
    if options.optimizer == "muon":
        operations += sum(flop_of_muon(*shape, precision, "cpu") for shape in trained_parameters(recipe, drafter)[1])
    return _optimizer_step(loss, batch, options), operations


def step_of_kind(
    recipe: Recipe, target: TargetInfo, sequences: list[Sequence], vocabulary: torch.Tensor
) -> tuple[Callable[[], None], float]:
    """The trainer's step of a recipe's drafter on these sequences, whose last state is the target's, and the operations that it needs."""
    disable_malloc_trim()
    options, tensors = recipe.train, load_target_tensors(target.path)
    kind, states = drafter_class(options.drafter.kind), sequences[0].hidden_states.shape[1]
    config = kind.make_config(options.drafter, target, tuple(range(states - 1)), len(vocabulary))
    drafter = kind.from_target(config, tensors, vocabulary)
    for head in drafter.head_parameters():
        head.requires_grad_(options.train_lm_head)
    steps, terms = drafter.max_draft_tokens or options.ttt_steps, drafter.loss_terms(options.drafter)
    loss = (BlockLoss if terms.in_blocks else ChainLoss)(
        drafter,
        teacher_norm=FinalNorm.of(tensors, target.facts.norm_eps),
        teacher_head=tensors.lm_head[vocabulary].float(),
        ttt_steps=steps,
        ttt_loss_decay=options.ttt_loss_decay,
        loss=options.loss,
        loss_vocab_size=options.loss_vocab_size,
        terms=terms,
    )
    packed = pack(sequences, steps=steps, prompt_weight=options.prompt_loss_weight)
    draw = torch.Generator().manual_seed(0)
    lengths = [len(one.hidden_states) for one in sequences]
    weights = [kind.trained_rows(options.drafter, part, draw) for part in packed.loss_weights.split(lengths)]
    batch = replace(packed, loss_weights=torch.cat(weights)).with_layers(list(range(states - 1)), states - 1)

    return _optimizer_step(loss, batch, options), operations_of_kind(recipe, drafter, batch)


def _optimizer_step(loss: ChainLoss, batch: Batch, options: TrainConfig) -> Callable[[], None]:
    """The trainer's step on a batch, which it repeats."""
    drafter = loss.drafter
    optimizers = make_optimizers(options, drafter)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bfloat16"):
            total = loss(batch).loss
        total.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), options.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def operations_of_kind(recipe: Recipe, drafter: Drafter, batch: Batch) -> float:
    """Floating-point operations that a step of the trainer needs on a batch, as `useful_operations` counts them, for any kind with a
    frozen head of its own."""
    options, config, rows = recipe.train, drafter.config, len(batch.positions)
    assert not options.train_lm_head
    weights = batch.loss_weights > 0
    steps, shapes = weights.shape[1], drafter.shapes(drafter.config)
    in_blocks = drafter.loss_terms(options.drafter).in_blocks
    queries = weights.any(1)
    # Rows that take so many draft steps: all of a block, and in a chain those up to the last that is trained.
    reached = [int((queries if in_blocks else weights[:, k:].any(1)).sum()) for k in range(steps)]
    counts = [drafter.matmul_counts(config, k + 1) for k in range(steps)]
    total = 0.0
    for name, (of_context, often) in counts[0].items():
        times = (rows - reached[0]) * of_context + reached[0] * often
        times += sum(reached[k] * (counts[k][name][1] - counts[k - 1][name][1]) for k in range(1, steps))
        # Forward, gradient of the input, gradient of the weight; `fc` reads data.
        total += (4 if name == "fc.weight" else 6) * math.prod(shapes[name]) * times
    (head,) = drafter.head_parameters()
    vocabulary = min(options.loss_vocab_size or len(head), len(head))
    taught = int(weights.sum())
    width = head.shape[1] + getattr(config, "markov_rank", 0)
    total += 4 * taught * width * vocabulary
    terms = drafter.loss_terms(options.drafter)
    if terms.acceptance_alpha is not None:  # the weights take the logits once more
        total += 2 * taught * width * vocabulary
    if terms.targets == "distribution":
        total += 2 * taught_rows(weights) * head.shape[1] * vocabulary
    if vocabulary < len(head):
        total += 2 * 2 * head.shape[1] * min(ROWS_ASKED, taught) * len(head)
    # A score and a mixed value at each key that is seen: the context's, and the block's or chain's own.
    heads = int(config.num_attention_heads) * int(config.head_dim)  # type: ignore[attr-defined]
    layers = int(config.num_layers)  # type: ignore[attr-defined]
    for k in range(steps):
        at = queries if in_blocks else weights[:, k:].any(1)
        own = steps + 1 if in_blocks else k
        total += 12 * heads * layers * float((batch.positions[at] + 1 + own).sum())
    if options.optimizer == "muon":
        total += sum(
            flop_of_muon(*shape, options.precision or "float32", "cpu")
            for shape in trained_parameters(recipe, drafter)[1]
        )
    return total


def taught_rows(weights: torch.Tensor) -> int:
    """Rows whose state gives the distribution of some trained draft token, by bool `weights` [rows, K]."""
    rows, steps = weights.shape
    taught = torch.zeros(rows + steps + 1, dtype=torch.bool)
    for step in range(steps):
        taught[weights[:, step].nonzero()[:, 0] + 1 + step] = True
    return int(taught.sum())


def _reference(sequences: list[Sequence], precision: Precision) -> Callable[[], None]:
    drafter = ReferenceEagle3(torch.randn(VOCAB, HIDDEN) * 0.05, torch.arange(DRAFT))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    ids = torch.cat([one.token_ids[:-1].long() for one in sequences])
    states = torch.cat([one.hidden_states for one in sequences])
    documents = torch.cat([torch.full((len(one.hidden_states),), one.sample_id) for one in sequences])

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            total = drafter.loss(ids, states, documents)
        total.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()

    return step


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def useful_operations(batch: Batch, *, loss_vocabulary: int) -> float:
    """Floating-point operations that forward and backward of one step need, the head frozen."""
    rows, queries = len(batch.positions), int((batch.loss_weights.sum(1) > 0).sum())
    keys_values = 2 * HIDDEN * 2 * KV_HEADS * HEAD_DIM
    others = 2 * HIDDEN * HEADS * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INNER
    # 6 = forward, gradient of the input, gradient of the weight. fc reads data: 4 (the gradient of the norms' weights
    # before it follows from that of its own). The head is frozen: 4.
    drafter = rows * (4 * FUSED * HIDDEN * HIDDEN + 6 * keys_values) + queries * (
        6 * keys_values * (STEPS - 1) + 6 * STEPS * others
    )
    head = 4 * int((batch.loss_weights > 0).sum()) * HIDDEN * loss_vocabulary
    rows_taught = taught_rows(batch.loss_weights > 0)
    teacher = 2 * HIDDEN * rows_taught * loss_vocabulary
    if loss_vocabulary < DRAFT:
        asked = math.ceil(rows_taught / math.ceil(rows_taught / ROWS_ASKED))
        teacher += 2 * 2 * HIDDEN * asked * DRAFT  # by the teacher's head, and about as many by the drafter's
    # A score and a mixed value at each visible key: 4 a number of a head forward, twice that backward. Positions count from
    # 0, and at chain step k a row also sees its own k later keys.
    visible = sum((batch.positions[batch.loss_weights.sum(1) > 0] + 1 + step).sum().item() for step in range(STEPS))
    attention = 12 * HEADS * HEAD_DIM * visible
    return drafter + head + teacher + attention
