"""Trees of draft tokens: branches against whole chains over changed texts, trees against enumeration, and what is accepted in them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from draftsmith.config.drafters import KINDS
from draftsmith.drafters import decoder, drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.branches import RepeatedChains
from draftsmith.drafters.dspark import DSparkDrafter
from draftsmith.store.format import Sequence
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.acceptance import count_accepted
from draftsmith.train.packing import pack
from draftsmith.train.trees import TreeShape, accepted_in_trees, count_in_trees, predict_tree_acceptance
from tests.unit.tiny_run import HIDDEN, LAYERS, VOCAB, make_recipe, make_run

DEPTH, DRAFT, TOKENS, PROMPT = 3, 14, 26, 5
CASES: dict[str, dict] = {
    "eagle": {"kind": "eagle"},
    "eagle3": {"kind": "eagle3"},
    "eagle3-two-layers": {"kind": "eagle3", "num_layers": 2},
    "p_eagle": {"kind": "p_eagle", "num_layers": 2, "num_depths": 4},
    "dflash": {"kind": "dflash", "block_size": 5},
    "dflash-causal": {"kind": "dflash", "block_size": 5, "causal": True},
    "dspark": {"kind": "dspark", "block_size": 5, "markov_rank": 8},
    "dspark-from-anchor": {
        "kind": "dspark",
        "block_size": 4,
        "markov_rank": 8,
        "sample_from_anchor": True,
        "enable_confidence_head": True,
    },
    "medusa": {"kind": "medusa", "num_heads": 4},
    "mlp_speculator": {"kind": "mlp_speculator", "n_predict": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trees")
    make_run(path)
    return path


def make_drafter(folder: Path, options: dict) -> Drafter:
    """Random, and sharp enough that one branch is not like another."""
    target, kind = describe_target(folder / "target"), drafter_class(options["kind"])
    causal = {"causal": True} if options.get("causal") else {}
    recipe = make_recipe(folder, drafter={name: value for name, value in options.items() if name != "causal"})
    drafter_options = recipe.train.drafter
    layer_ids = kind.layer_ids(drafter_options, (1, 2, LAYERS), LAYERS)
    torch.manual_seed(2)
    whole = drafter_options.kind in ("eagle", "medusa", "mlp_speculator")
    ids = torch.arange(VOCAB) if whole else torch.randperm(VOCAB)[:DRAFT].sort().values
    config = kind.make_config(drafter_options, target, layer_ids, len(ids))
    drafter = kind.from_target(replace(config, **causal), load_target_tensors(folder / "target"), ids).double()
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter.eval()


def log_probabilities(
    drafter: Drafter, sequence: Sequence, p: int, path: list[int], depth: int = DEPTH
) -> torch.Tensor:
    """[V]: what follows x_{p+1} and a path, by one chain over a text that holds them, from its only row p."""
    ids = torch.cat([sequence.token_ids[: p + 2], torch.tensor([*path, *[0] * (depth + 1)], dtype=torch.int32)])
    text = Sequence(0, False, ids, torch.arange(len(ids)) == p + 2, sequence.hidden_states[: p + 1])
    batch = columns_of(drafter, pack([text], steps=depth))
    batch = replace(batch, loss_weights=torch.ones_like(batch.loss_weights) * (batch.positions == p)[:, None])
    steps = depth if drafter.depends_on_k else len(path) + 1
    *_, last = list(drafter.chain(batch, steps=steps))[: len(path) + 1]
    return (last.normed[-1] @ last.head.T).log_softmax(-1)


def columns_of(drafter: Drafter, batch: Batch) -> Batch:
    return batch.with_layers([(1, 2, LAYERS).index(layer) for layer in drafter.config.layer_ids])


@torch.no_grad()
def text_for(drafter: Drafter, seed: int) -> Sequence:
    """A text that the drafter often guesses: each token is one of the likeliest few after some position."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(TOKENS - 1, 3, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator, dtype=torch.int32)
    sequence = Sequence(seed, False, ids, torch.arange(TOKENS) >= PROMPT, states)
    for p in range(PROMPT - 2, TOKENS - 2 - DEPTH, DEPTH + 1):
        for ahead in range(DEPTH):
            guesses = log_probabilities(drafter, sequence, p, sequence.token_ids[p + 2 : p + 2 + ahead].tolist())
            rank = int(torch.randint(0, 3, (), generator=generator))
            sequence.token_ids[p + 2 + ahead] = int(drafter.draft_token_ids[guesses.topk(3).indices[rank]])
    return sequence


Next = Callable[[list[int]], torch.Tensor]


def by_levels(following: Next, ids: list[int], tokens: int, depth: int, top_k: int) -> set[tuple[int, ...]]:
    """EAGLE-2's tree, node by node: its paths."""
    nodes: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level = {}
        for path, worth in frontier.items():
            found = following([*path])
            for place in found.topk(min(top_k, len(found))).indices.tolist():
                level[*path, ids[place]] = worth + float(found[place])
        nodes |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
    return {path for path, _ in sorted(nodes.items(), key=lambda item: -item[1])[:tokens]}


def by_heap(following: Next, ids: list[int], tokens: int, depth: int) -> set[tuple[int, ...]]:
    """The best nodes of all, each taken from a heap that then gets its children: their paths."""
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    taken: list[tuple[int, ...]] = []
    while heap and len(taken) <= tokens:
        cost, path = heapq.heappop(heap)
        taken.append(path)
        if len(path) < depth:
            for place, score in enumerate(following([*path]).tolist()):
                heapq.heappush(heap, (cost - score, (*path, ids[place])))
    return {*taken[1:]}


def walk_down(tree: set[tuple[int, ...]], text: list[int]) -> int:
    depth = 0
    while depth < len(text) and tuple(text[: depth + 1]) in tree:
        depth += 1
    return depth


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_branches_are_chains_over_other_texts(folder: Path, name: str) -> None:
    drafter = make_drafter(folder, CASES[name])
    sequence = text_for(drafter, 0)
    other = text_for(drafter, 1)
    batch = columns_of(drafter, pack([other, sequence], steps=DEPTH))  # the rows are of the second document
    places = torch.tensor([3, 9, 10, 20])
    rows = places + len(other.hidden_states)
    generator = torch.Generator().manual_seed(1)
    for branches in (drafter.branches(batch, rows, steps=DEPTH), RepeatedChains(drafter, batch, rows, steps=DEPTH)):
        parents, tokens = torch.arange(4), batch.next_tokens[rows, 0]
        paths: list[tuple[int, list[int]]] = []
        for level in range(DEPTH):
            found = branches.step(parents, tokens)
            grown = [
                (int(places[i]), []) if level == 0 else (paths[i][0], [*paths[i][1], t])
                for i, t in zip(parents.tolist(), tokens.tolist(), strict=True)
            ]
            paths = grown
            logits = found.logits().log_softmax(-1)[found.of_branch]
            for (p, path), mine in zip(paths, logits, strict=True):
                torch.testing.assert_close(mine, log_probabilities(drafter, sequence, p, path))
            # Some branches have several children, and some none.
            parents = torch.randint(0, len(paths), (11,), generator=generator).sort().values
            tokens = drafter.draft_token_ids[torch.randint(0, DRAFT, (11,), generator=generator)]


@pytest.mark.parametrize("name", ["dspark", "dspark-from-anchor"])
@torch.no_grad()
def test_branches_of_dspark_share_the_logits_of_their_block(folder: Path, name: str) -> None:
    """Against the head's product for each branch, [state of the block, w1(token)] @ [lm_head, w2].T; and the wide part of it is taken over a
    row once, however many branches the row has."""
    drafter = make_drafter(folder, CASES[name])
    assert isinstance(drafter, DSparkDrafter)
    batch = columns_of(drafter, pack([text_for(drafter, 0)], steps=DEPTH))
    rows = torch.tensor([3, 9, 10, 20])
    block, markov = drafter.block(batch, rows, DEPTH), drafter.markov_head
    head = torch.cat([drafter.lm_head.weight, markov.markov_w2.weight], dim=1)
    branches, products = drafter.branches(batch, rows, steps=DEPTH), []
    parents, tokens, roots = torch.arange(4), batch.next_tokens[rows, 0], torch.arange(4)

    def linear(read: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products.append((len(read), weight.shape[1]))
        return read @ weight.T

    for level in range(DEPTH):
        roots = roots[parents]
        found = branches.step(parents, tokens)
        expected = torch.cat([block[roots, level], markov.markov_w1(tokens)], dim=1) @ head.T
        torch.testing.assert_close(found.logits()[found.of_branch], expected)
        with mock.patch("draftsmith.drafters.branches.F.linear", linear):
            part = found.logits(slice(1, 8))  # begins and ends within a row
        torch.testing.assert_close(part, expected[1:8])
        assert products.pop() == (len(roots[1:8].unique()), HIDDEN)
        assert not products
        parents = torch.randint(0, len(tokens), (17,), generator=torch.Generator().manual_seed(level)).sort().values
        tokens = drafter.draft_token_ids[torch.randint(0, DRAFT, (17,), generator=torch.Generator().manual_seed(9))]


@torch.no_grad()
def test_a_branch_with_the_keys_of_another_is_noticed(folder: Path) -> None:
    """The planted fault: a branch goes on from its own state, and sees the keys and values of its neighbor."""
    drafter = make_drafter(folder, CASES["eagle3"])
    sequence = text_for(drafter, 0)
    batch = columns_of(drafter, pack([sequence], steps=DEPTH))
    rows = torch.tensor([9])

    def last_of(branches: decoder._Branches, faulty: bool) -> torch.Tensor:
        branches.step(torch.tensor([0]), batch.next_tokens[rows, 0])
        branches.step(torch.tensor([0, 0]), drafter.draft_token_ids[:2])
        if faulty:
            branches._own = [[(keys.flip(0), values.flip(0)) for keys, values in pairs] for pairs in branches._own]
        found = branches.step(torch.tensor([0, 1]), drafter.draft_token_ids[2:4])
        return found.logits().log_softmax(-1)

    token = [int(token) for token in drafter.draft_token_ids[:4]]
    expected = torch.stack([log_probabilities(drafter, sequence, 9, [token[i], token[2 + i]]) for i in range(2)])
    for faulty in (False, True):
        found = last_of(drafter.branches(batch, rows, steps=DEPTH), faulty)  # type: ignore[arg-type]
        assert torch.allclose(found, expected, atol=1e-5) != faulty


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_trees_are_those_of_enumeration(folder: Path, name: str) -> None:
    drafter = make_drafter(folder, CASES[name])
    sizes, top_k = (2, 7, 16), None if drafter.drafts_at_once else 3
    sequence = text_for(drafter, 3)
    batch = columns_of(drafter, pack([sequence], steps=DEPTH))
    rows = torch.arange(PROMPT - 2, TOKENS - 3)
    found = accepted_in_trees(drafter, batch, rows, shape=TreeShape(sizes, DEPTH, top_k))
    ids = drafter.draft_token_ids.tolist()
    expected, faulty = [], []
    for p in rows.tolist():
        known: dict[tuple[int, ...], torch.Tensor] = {}

        def following(path: list[int], p: int = p, known: dict[tuple[int, ...], torch.Tensor] = known) -> torch.Tensor:
            if tuple(path) not in known:
                known[tuple(path)] = log_probabilities(drafter, sequence, p, path)
            return known[tuple(path)]

        text = sequence.token_ids[p + 2 : p + 2 + DEPTH].tolist()
        for size in sizes:
            wide = DRAFT if top_k is None else top_k
            tree = (
                by_heap(following, ids, size, DEPTH) if top_k is None else by_levels(following, ids, size, DEPTH, wide)
            )
            assert len(tree) == size
            assert all(path[:-1] in tree for path in tree if len(path) > 1)
            expected.append(walk_down(tree, text))
            same = by_levels(lambda _, known=known: known[()], ids, size, DEPTH, wide)  # type: ignore[misc]
            faulty.append(walk_down(same, text))
    assert found.flatten().tolist() == expected
    assert max(expected) >= 2
    assert len({*expected}) > 2
    assert expected != faulty, "a drafter that says the same at every node has other trees"


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_what_holds_for_every_tree(folder: Path, name: str) -> None:
    drafter = make_drafter(folder, CASES[name])
    texts = [text_for(drafter, seed) for seed in (4, 5, 6)]
    batch = columns_of(drafter, pack(texts, steps=DEPTH))
    rows = (batch.loss_weights[:, 0] > 0).nonzero()[:, 0]
    top_k = None if drafter.drafts_at_once else 4

    # A chain is the tree with one node on each level; also where a turn of the user comes between two responses.
    turns = [replace(text, loss_mask=text.loss_mask & (torch.arange(TOKENS) % 4 != 2)) for text in texts]
    counted = []
    for each in (batch, columns_of(drafter, pack(turns, steps=DEPTH))):
        chains = count_accepted(drafter, [each], k=DEPTH)
        counted.append(chains)
        for k in range(DEPTH if drafter.depends_on_k else 1, DEPTH + 1):
            assert count_in_trees(drafter, each, shape=TreeShape((k,), DEPTH, 1))[k] == chains[k]
    assert counted[0] != counted[1]
    chains = counted[0]

    # Smaller trees are parts of larger ones.
    found = accepted_in_trees(drafter, batch, rows, shape=TreeShape((1, 2, 5, 12, 30), DEPTH, top_k))
    assert (found.diff(dim=1) >= 0).all()
    assert (found[:, -1] > found[:, 0]).any()
    assert (found[:, 0] <= 1).all()
    small = accepted_in_trees(drafter, batch, rows, shape=TreeShape((2, 5), DEPTH, top_k))
    assert torch.equal(small, found[:, 1:3])

    # Packed documents do not see each other, and tokens are counted document by document.
    counts = count_in_trees(drafter, batch, shape=TreeShape((5,), DEPTH, top_k))[5]
    alone = [
        count_in_trees(drafter, columns_of(drafter, pack([text], steps=DEPTH)), shape=TreeShape((5,), DEPTH, top_k))[5]
        for text in texts
    ]
    assert counts == tuple(map(sum, zip(*alone, strict=True)))
    whole = predict_tree_acceptance(
        drafter,
        [columns_of(drafter, pack([text], steps=DEPTH)) for text in texts],
        shape=TreeShape((5,), DEPTH, top_k),
    )
    hits, drafts = counts
    assert whole.trees[5].acceptance_length == pytest.approx(1 + hits / drafts)
    assert whole.trees[5].drafts == drafts
    assert whole.chains[DEPTH].acceptance_length == pytest.approx(1 + chains[DEPTH][0] / chains[DEPTH][1])
    low, high = whole.trees[5].interval
    residuals = sum((h - hits / drafts * d) ** 2 for h, d in alone)
    assert (high - low) / 2 == pytest.approx(1.96 * (residuals * 3 / 2) ** 0.5 / drafts)


@torch.no_grad()
def test_a_certain_drafter_drafts_a_chain(folder: Path) -> None:
    """Every node of the likeliest path is worth 1: what is worth as much as its parent comes after it."""
    drafter = make_drafter(folder, CASES["eagle3"])
    batch = columns_of(drafter, pack([text_for(drafter, seed) for seed in range(7, 12)], steps=DEPTH))
    assert isinstance(drafter.lm_head, torch.nn.Linear)
    drafter.lm_head.weight.mul_(1e6)
    chains = count_accepted(drafter, [batch], k=DEPTH)
    trees = count_in_trees(drafter, batch, shape=TreeShape((1, 2, DEPTH), DEPTH, 4))
    assert trees == chains
    assert chains[1] != chains[2]


def test_a_text_without_a_row_to_draft_from(folder: Path) -> None:
    drafter = make_drafter(folder, CASES["eagle3"])
    batch = columns_of(drafter, pack([text_for(drafter, 3)], steps=DEPTH))
    nothing = replace(batch, loss_weights=torch.zeros_like(batch.loss_weights))
    assert count_in_trees(drafter, nothing, shape=TreeShape((1, 5), DEPTH, 4)) == {1: (0, 0), 5: (0, 0)}


def test_every_kind_is_here() -> None:
    assert {options["kind"] for options in CASES.values()} == {*KINDS}
