"""Predict what a trained drafter's trees of draft tokens would have accepted, beside chains and beside what checking them costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.config.recipe import Recipe
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.checkpoint import TREES, WEIGHTS
from draftsmith.run.atomic_io import sha256_of, write_json
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar
from draftsmith.target.prepare import prepare_target
from draftsmith.target.reference_states import reference_model
from draftsmith.target.step_time import step_times
from draftsmith.train.packing import pack
from draftsmith.train.predict import open_run
from draftsmith.train.trees import Estimate, TreeShape, predict_tree_acceptance

DEPTH, TOP_K, SEQUENCES = 5, 8, 64
"""Of trees, unless others are asked for: levels, what is extended on each, and held-out sequences."""


def predict_trees(
    recipe: Recipe,
    run_dir: Path,
    *,
    tokens: Sequence[int],
    depth: int | None = None,
    top_k: int = TOP_K,
    sequences: int | None = SEQUENCES,
    step_cost: bool = True,
    store_dir: Path | None = None,
) -> dict[str, Any]:
    """What trees of draft tokens would have accepted in held-out text, beside chains; written to `run_dir/trees.json` too.

    Args:
        recipe: `target` and `seed` are read.
        run_dir: `runs/NAME`, with the drafter in `checkpoint/`.
        tokens: draft tokens of each tree.
        depth: levels of the trees; None for all that a drafter of one forward pass has, and `DEPTH` for others.
        top_k: nodes that are extended on a level, and children of each; of no use to a drafter of one forward pass.
        sequences: held-out sequences, drawn by the recipe's seed; None for all.
        step_cost: measure what the target's forward pass over so many tokens costs on this machine.
        store_dir: see `predict`.

    Returns:
        `checkpoint`, the SHA-256 of its weights; `drafter`, its kind; `own_text`, whether the target wrote the text, greedily and without penalties;
        `sequences`; `depth`; `top_k`, None for the best of all trees; `chains` by K and `trees` by draft tokens, as text, each with
        `acceptance_length`, its 95% `interval` over sequences, `drafts`, and `step_cost`, the time of the target's forward pass over the
        draft tokens and one more in units of that over one; `best`, what has most tokens per cost (`shape`: chain or tree, and `tokens`),
        None without costs; `step`, how they were measured (`seconds` of one token, `context`, `dtype`, `device`), or None.

    Raises:
        UserError: as for `predict`; a tree cannot be of that size; or the recipe's answers are sampled.
    """
    if not recipe.evaluate.sampling.greedy:
        raise UserError(
            f"The recipe's answers are sampled ({recipe.evaluate.sampling}), and what a tree accepts is predicted for greedy decoding "
            "alone: a text shows one continuation. Use -s evaluate.temperature=0."
        )
    run = open_run(recipe, run_dir, store_dir)
    shape = _shape(run.drafter, tokens, depth=depth, top_k=top_k)
    rows = run.rows
    if sequences is not None and sequences < len(rows):
        drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(recipe.seed))[:sequences]
        rows = [rows[place] for place in sorted(drawn.tolist())]
    with Bar("predict", total=len(rows), unit="sequences") as bar:

        def batches() -> Iterator[Batch]:
            for row in rows:
                yield pack([run.store[row]], steps=shape.depth).with_layers(run.columns)
                bar.step()

        found = predict_tree_acceptance(run.drafter, batches(), shape=shape)
    step, costs = None, dict[int, float]()
    if step_cost:
        context = max(1, sum(map(run.store.length, rows)) // len(rows))
        checked = {count + 1 for count in (*found.chains, *found.trees)}
        dtype = getattr(torch, recipe.target.dtype)
        model = reference_model(
            prepare_target(recipe.target), dtype, trust_remote_code=recipe.target.trust_remote_code
        ).to(run.device)
        seconds = step_times(model, {1, *checked}, context=context)
        costs = {count: seconds[count] / seconds[1] for count in checked}
        step = {
            "seconds": seconds[1], "context": context, "dtype": recipe.target.dtype, "device": str(run.device),
            "threads": torch.get_num_threads(),
        }  # fmt: skip
    chains, trees = (
        {str(count): _record(one, costs.get(count + 1)) for count, one in each.items()}
        for each in (found.chains, found.trees)
    )
    ways = [("chain", k, one) for k, one in chains.items()] + [("tree", size, one) for size, one in trees.items()]
    best = max(ways, key=lambda way: way[2]["acceptance_length"] / way[2]["step_cost"]) if costs else None
    result = {
        "checkpoint": sha256_of(run_dir / "checkpoint" / WEIGHTS), "drafter": run.kind, "own_text": run.own_text,
        "sequences": len(rows), "depth": shape.depth, "top_k": shape.top_k, "chains": chains, "trees": trees,
        "best": None if best is None else {"shape": best[0], "tokens": int(best[1])}, "step": step,
    }  # fmt: skip
    write_json(run_dir / TREES, result)
    return result


def _shape(drafter: Drafter, tokens: Sequence[int], *, depth: int | None, top_k: int) -> TreeShape:
    """The trees that are asked for. Raises UserError: the drafter has none of that depth or size."""
    most = drafter.max_draft_tokens
    if depth is not None and most is not None and depth > most:
        raise UserError(f"--tree-depth is {depth}, and the drafter drafts at most {most} tokens ahead.")
    if depth is None:
        depth = most if most and drafter.drafts_at_once else min(DEPTH, most or DEPTH)
    sizes = tuple(sorted({*tokens}))
    if drafter.drafts_at_once:
        return TreeShape(sizes, depth, None)
    top_k = min(top_k, len(drafter.draft_token_ids))
    room = top_k + (depth - 1) * top_k**2
    if sizes[-1] > room:
        raise UserError(
            f"A tree of {sizes[-1]} tokens was asked for, and with --tree-depth {depth} and --tree-top-k {top_k} there are {room} to "
            "choose from. Ask for fewer, or raise one of the two."
        )
    return TreeShape(sizes, depth, top_k)


def _record(estimate: Estimate, step_cost: float | None) -> dict[str, Any]:
    return {
        "acceptance_length": round(estimate.acceptance_length, 4),
        "interval": [round(end, 4) for end in estimate.interval],
        "drafts": estimate.drafts,
        "step_cost": None if step_cost is None else round(step_cost, 4),
    }
