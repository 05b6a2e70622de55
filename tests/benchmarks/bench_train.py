"""How fast EAGLE-3 trains: against what limits it, against a first try, and against speculators.

`training_step`: one step at SmolLM2-135M's shapes, all takers in turn in one run, on the same tensors: 1,024 rows in 5
documents, of which 30% are prompt, as in ShareGPT, and count as in `recipes/learn.yaml`; 3 fused states, draft vocabulary
8192, 3 chain steps. Loading is outside the clock for all.

- Ours is what the trainer does for a step of `recipes/learn.yaml`: its loss, clipping, its optimizers.
- The limit is the rate of one plain matrix product. Our useful operations are counted from the formulas, for the rows that
  the loss needs: two for each weight a row meets forward, twice that backward, none for the gradient of a frozen head; the
  head and the teacher over the part of the draft vocabulary that the loss is taken over, both over all of it for the rows
  that choose the part; and the products of Muon's iteration on Gram matrices. Attention, norms and softmax are not counted.
- The first try (`first_try.py`) with AdamW, and speculators' model with its own optimizer (`peer_driver.py`), do what they
  do for all rows.

`time_to_peer`: training to the same acceptance on the store of `recipes/learn.yaml`.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from draftsmith.config.loading import load_recipe
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.run.process import disable_malloc_trim
from draftsmith.store.format import Sequence
from draftsmith.train import epochs as epoch_end
from draftsmith.train import train
from draftsmith.train.loss import ROWS_ASKED, ChainLoss
from draftsmith.train.optimizers import make_optimizers
from draftsmith.train.packing import pack
from tests.benchmarks import bench_learn
from tests.benchmarks.figures import Figure, figure
from tests.benchmarks.first_try import DRAFT, FUSED, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, STEPS, VOCAB, FirstTry
from tests.benchmarks.peer_speculators import hand_over, stepping
from tests.benchmarks.sweep import length

ROUNDS, ROWS, DOCUMENTS, PROMPT = 12, 1024, 5, 61
MATMUL = (1024, 1536, 1536)
PRODUCTS = 20
"""Matrix products between two looks at the clock."""


def training_step() -> dict[str, Figure]:
    """`train.tokens_per_second`, `train.matmul_fraction`, `train.first_try_ratio` and `train.peer_ratio`."""
    torch.manual_seed(0)
    target = bench_learn.learn_target()
    layers = target.num_hidden_layers
    saved = (2, layers // 2, layers - 3, layers)
    sequences = _sequences(len(saved))
    ours, operations = _ours(sequences)
    rows, inner, columns = MATMUL
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)

    def products() -> None:
        for _ in range(PRODUCTS):
            a @ b

    first_try = _first_try(sequences)
    with (
        tempfile.TemporaryDirectory() as folder,
        stepping(hand_over(target, saved, torch.arange(DRAFT)), sequences, Path(folder)) as peer,
    ):
        takers: dict[str, Callable[[], float]] = {
            "products": lambda: _seconds(products),
            "ours": lambda: _seconds(ours),
            "first try": lambda: _seconds(first_try),
            "peer": peer,
        }
        for take in takers.values():  # first calls allocate and choose kernels
            take()
        times: dict[str, list[float]] = {name: [] for name in takers}
        for turn in range(ROUNDS):
            for name in takers if turn % 2 == 0 else reversed(takers):
                times[name].append(takers[name]())
    possible = [PRODUCTS * 2 * rows * inner * columns / seconds for seconds in times["products"]]
    fractions = [operations / seconds / most for seconds, most in zip(times["ours"], possible, strict=True)]
    tokens = {name: [ROWS / one for one in seconds] for name, seconds in times.items()}

    def ratio(name: str, against: str, bar: float) -> Figure:
        runs = [mine / theirs for mine, theirs in zip(tokens["ours"], tokens[name], strict=True)]
        rate = statistics.median(tokens[name])
        return figure(runs, "ratio", f"{against}: {rate:.0f} tokens/s", direction="higher", bar=bar)

    rate = statistics.median(possible) / 1e9
    return {
        "train.tokens_per_second": figure(tokens["ours"], "tokens/s", "nothing; noisy machine", direction="higher"),
        "train.matmul_fraction": figure(
            fractions, "ratio", f"one {list(MATMUL)} product: {rate:.0f} GFLOP/s", direction="higher", bar=0.70
        ),
        "train.first_try_ratio": ratio("first try", "the first try's step", 1.5),
        "train.peer_ratio": ratio("peer", "speculators' model and optimizer, Muon in float32", 1.5),
    }


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
        target, text, bench_learn.peer_vocabulary(recipe, target, text.store), lr=best.more["lr"],
        layer_ids=tuple(best.more["layer_ids"]), epochs=best.more["epochs"], fresh=True,
    )  # fmt: skip
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


def _ours(sequences: list[Sequence]) -> tuple[Callable[[], None], float]:
    """The trainer's step on these sequences, and the operations that it needs."""
    disable_malloc_trim()
    recipe = load_recipe(bench_learn.RECIPES / "learn.yaml")
    options = recipe.train
    config = Eagle3Config(
        layer_ids=tuple(range(FUSED)), hidden_size=HIDDEN, intermediate_size=INNER, num_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, hidden_act="silu", rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, max_position_embeddings=2048, vocab_size=VOCAB,
        draft_vocab_size=DRAFT, norm_before_residual=False, fc_norm=True, norm_output=False,
    )  # fmt: skip
    drafter = Eagle3Drafter(config, torch.randn(VOCAB, HIDDEN), torch.arange(DRAFT))
    drafter.lm_head.requires_grad_(options.train_lm_head)
    loss = ChainLoss(
        drafter, teacher_norm=torch.nn.RMSNorm(HIDDEN), teacher_head=torch.randn(DRAFT, HIDDEN) / HIDDEN**0.5,
        ttt_steps=STEPS, ttt_loss_decay=options.ttt_loss_decay, loss=options.loss, loss_vocab_size=options.loss_vocab_size,
    )  # fmt: skip
    optimizers = make_optimizers(options, drafter)
    packed = pack(sequences, steps=STEPS, prompt_weight=options.prompt_loss_weight)
    batch = packed.with_layers(list(range(FUSED)), FUSED)

    def step() -> None:
        loss(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), options.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    assert not options.train_lm_head  # else the head's own gradient would count too
    operations = useful_operations(batch, loss_vocabulary=options.loss_vocab_size or DRAFT)
    if options.optimizer == "muon":
        operations += muon_operations()
    return step, operations


def _first_try(sequences: list[Sequence]) -> Callable[[], None]:
    drafter = FirstTry(torch.randn(VOCAB, HIDDEN) * 0.05, torch.arange(DRAFT))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    ids = torch.cat([one.token_ids[:-1].long() for one in sequences])
    states = torch.cat([one.hidden_states for one in sequences])
    documents = torch.cat([torch.full((len(one.hidden_states),), one.sample_id) for one in sequences])

    def step() -> None:
        optimizer.zero_grad()
        drafter.loss(ids, states, documents).backward()
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
    taught = torch.zeros(rows + STEPS + 1, dtype=torch.bool)
    for step in range(STEPS):
        taught[(batch.loss_weights[:, step] > 0).nonzero()[:, 0] + 1 + step] = True
    rows_taught = int(taught.sum())
    teacher = 2 * HIDDEN * rows_taught * loss_vocabulary
    if loss_vocabulary < DRAFT:
        asked = math.ceil(rows_taught / math.ceil(rows_taught / ROWS_ASKED))
        teacher += 2 * 2 * HIDDEN * asked * DRAFT  # by the teacher's head, and about as many by the drafter's
    # A score and a mixed value at each visible key: 4 a number of a head forward, twice that backward. Positions count from
    # 0, and at chain step k a row also sees its own k later keys.
    visible = sum((batch.positions[batch.loss_weights.sum(1) > 0] + 1 + step).sum().item() for step in range(STEPS))
    attention = 12 * HEADS * HEAD_DIM * visible
    return drafter + head + teacher + attention


def muon_operations() -> float:
    """Of Muon's five iterations for all matrices, on the shorter side's Gram matrix (see `orthogonalize`)."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = [
        (HIDDEN, FUSED * HIDDEN), (queries, 2 * HIDDEN), (keys, 2 * HIDDEN), (keys, 2 * HIDDEN), (HIDDEN, queries),
        (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER),
    ]  # fmt: skip
    total = 0.0
    for shape in matrices:
        short, long = min(shape), max(shape)
        # The Gram matrix, and the product of all polynomials applied to the matrix; between them each of five iterations
        # squares the Gram matrix, four multiply the polynomials, and four take the Gram matrix on, in two products.
        total += 2 * (2 * short * short * long) + (5 + 4 + 2 * 4) * 2 * short**3
    return total
