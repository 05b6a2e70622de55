"""Every family of targets goes the whole way, as a tiny model with random weights: its states in the store are transformers' own, a
drafter is trained on them, vLLM serves it, proposes what the trained module proposes, and the answers are those without it.

A run of all of them (`make soak`) prints the table of docs/supported.md from what it found, and writes it there.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.extract.extract import run_extract
from draftsmith.run.errors import DraftsmithError
from draftsmith.serve.proposals import compare_proposals, record
from draftsmith.store.reader import Store
from draftsmith.target.info import describe_target
from draftsmith.target.reference_states import reference_model, states_of
from draftsmith.train.train import run_train
from tests.families import FAMILIES, LAYERS, TinyFamily
from tests.family_checks import check_facts
from tests.integration.conftest import demo_prompts, load_drafter, write_recipe
from tests.soak import SOAKING, in_soak

pytestmark = pytest.mark.integration

ALWAYS = ("Gemma 2", "GLM-4 MoE", "OPT")
"""In every run of the tests; the others soak."""
PROMPTS = [
    "one two three",
    "Name three rivers.",
    "abc abc abc abc abc abc abc abc abc abc abc abc",
    "x",
    "What is a comet? " * 4,
]
K = 3
PAGE = Path(__file__).parents[2] / "docs" / "supported.md"
BEGIN, END = "<!-- families: written by tests/integration/test_families.py -->", "<!-- end of families -->"
NOT_HERE = {
    **dict.fromkeys(
        ("Qwen3-Next", "Qwen3.5", "MiniMax"),
        (
            "layers of linear attention",
            "on CPUs, vLLM 0.32 computes linear attention wrongly while it speculates or hands out states; refused",
        ),
    ),
    "MiniMax-M2": ("AssertionError", "vLLM's CPU build routes tokens to experts by softmax only"),
    "OPT": ("hands? (out )?no hidden states", "`extract.backend: transformers`, and `medusa` or `mlp_speculator`"),
}
"""Whose states vLLM's CPU build does not hand out: what it says, and the reason in the table. These go as far as they can without:
states by transformers, training, conversion, and serving where vLLM runs them."""
if torch.cpu._is_amx_tile_supported():
    NOT_HERE["DeepSeek-V3"] = (
        "expect weight to be bfloat16",
        "on CPUs with AMX, vLLM 0.32 computes latent attention in bfloat16 only",
    )
WITH_MEDUSA = ("OPT", "GPT-NeoX")
"""Families that vLLM serves without attention in the drafter only."""
NOT_SERVED = {
    "DeepSeek-V3": (
        "No common block size",
        "vLLM's CPU build has no block size for both latent attention and a drafter's",
    ),
}
"""What vLLM's CPU build cannot serve with a drafter, what it says, and the reason in the table."""


@dataclass
class Row:
    """What was found out about a family."""

    states: float | None = None
    """Largest difference from transformers' states, relative to their size."""
    compared: int = 0
    """Draft tokens that are the trained module's."""
    trained: bool = False
    """Whether a drafter was trained and converted."""
    same: bool = False
    """Whether greedy answers are those without a drafter."""
    reason: str = ""
    """Why it went no further."""


ROWS: dict[str, Row] = {}


@pytest.mark.parametrize(
    "tiny", [each for each in FAMILIES if SOAKING or each.name in ALWAYS], ids=lambda tiny: tiny.name
)
def test_a_family_goes_the_whole_way(tiny: TinyFamily, tmp_path: Path) -> None:
    row = ROWS[tiny.name] = Row()
    target = tmp_path / "target"
    check_facts(tiny.save(target), target)
    kind = "medusa" if tiny.name in WITH_MEDUSA else "eagle3"
    drafter = {"kind": "medusa"} if kind == "medusa" else {"draft_vocab_size": 128}
    recipe = recipe_of(tmp_path, target, drafter=drafter, ttt_steps=2)
    if tiny.name in NOT_HERE:
        with pytest.raises(DraftsmithError, match=NOT_HERE[tiny.name][0]):
            run_extract(recipe, tmp_path / "run", training_follows=True)
        row.reason = NOT_HERE[tiny.name][1]
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        recipe = recipe.model_copy(update={"extract": recipe.extract.model_copy(update={"backend": "transformers"})})
    run_extract(recipe, tmp_path / "run", training_follows=True)
    store = Store(tmp_path / "run" / "store")
    states = check_states(store, target)
    run_train(recipe, tmp_path / "run")
    run_convert(recipe, tmp_path / "run")
    row.trained = True
    # Where vLLM's own model hands out no states, the card's command must say what does.
    through_transformers = describe_target(target).facts.family.states == "backend"
    command = (tmp_path / "run" / "vllm" / "README.md").read_text()
    assert ('--hf-overrides \'{"architectures": ["Transformers' in command) == through_transformers
    if tiny.name not in NOT_HERE:
        row.states = states
    elif tiny.name not in WITH_MEDUSA:
        return

    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    drafters = [(tmp_path / "run" / "vllm", kind)]
    if tiny.name in NOT_SERVED:
        row.reason = NOT_SERVED[tiny.name][1]
        with pytest.raises(DraftsmithError, match=NOT_SERVED[tiny.name][0]):
            record(drafters, target, prompts, k=K, max_tokens=48)
        return
    (served,) = record(drafters, target, prompts, k=K, max_tokens=48)
    row.compared = sum(compare_proposals(served, load_drafter(tmp_path / "run", target), target))
    assert row.compared > 3 * 40
    check_answers(served.proposals, store)
    row.same = True
    row.reason = row.reason or ("with `medusa`" if kind == "medusa" else "")


def test_a_block_drafter_of_a_target_whose_embedding_is_scaled(tmp_path: Path) -> None:
    """vLLM's transformers backend gives drafters Gemma's embedding times the root of the hidden size. Kinds that norm what they read do
    not see it; the rows of a block are added to."""
    (llama,) = (each for each in FAMILIES if each.name == "Llama")
    # Not Gemma 2 with four layers: vLLM wants all of a drafter's layers in one group of its cache, and with as many layers with a window as
    # without, these are two groups.
    target = tmp_path / "target"
    TinyFamily("Gemma", "gemma", llama.fields | {"tie_word_embeddings": True, "head_dim": 32}).save(target)
    drafter = {
        "kind": "dflash",
        "draft_vocab_size": 128,
        "num_layers": 2,
        "block_size": K + 1,
        "layer_ids": [1, 2, LAYERS],
    }
    recipe = recipe_of(tmp_path, target, drafter=drafter)
    run_extract(recipe, tmp_path / "run", training_follows=True)
    run_train(recipe, tmp_path / "run")
    run_convert(recipe, tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    (served,) = record([(tmp_path / "run" / "vllm", "dflash")], target, prompts, k=K, max_tokens=48)
    trained = load_drafter(tmp_path / "run", target)
    assert sum(compare_proposals(served, trained, target)) > 3 * 40
    trained.embedding /= trained.embedding.shape[1] ** 0.5
    with pytest.raises(DraftsmithError, match="other draft tokens than the drafter's module"):
        compare_proposals(served, trained, target)


def recipe_of(folder: Path, target: Path, **train: Any) -> Recipe:
    """From a few prompts to a drafter, in a second or two."""
    path = write_recipe(
        folder,
        target,
        PROMPTS[:-1],
        PROMPTS[-1:],
        engine={"max_model_len": 256, "kv_cache_gib": 0.25},
        extract={"max_tokens": 48, "max_num_seqs": 8, "layer_ids": [LAYERS, 1, 2]},
        train={"epochs": 4, "tokens_per_step": 128} | train,
        evaluate={"k": [1, 2, 3], "acceptance_k": 3},
    )
    return load_recipe(path)


def check_states(store: Store, target: Path) -> float:
    """Every sequence's states are transformers' own; returns the largest difference, relative to the states' size."""
    model = reference_model(target, torch.float32)
    assert store.identity.layer_ids == (1, 2, LAYERS)
    worst = 0.0
    for sequence in store:
        ids = sequence.token_ids[: len(sequence.hidden_states)].long()
        for column, layer in enumerate(store.identity.layer_ids):
            expected = states_of(model, ids, (layer,))[:, 0]
            found = sequence.hidden_states[:, column]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
            worst = max(worst, ((found - expected).abs().max() / expected.abs().max()).item())
    return worst


def check_answers(proposals: list[dict[str, Any]], store: Store) -> None:
    """Contexts of the speculative engine begin as the store's answers, which were made without a drafter."""
    answers = [sequence.token_ids.tolist() for sequence in store]
    compared = 0
    for proposal in proposals:
        context = proposal["context"]
        matching = [answer for answer in answers if answer[: len(context)] == context[: len(answer)]]
        assert matching, f"no answer without a drafter begins with {context}"
        compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    "name", ["gpt-oss", pytest.param("Gemma 3", marks=in_soak), pytest.param("Mistral", marks=in_soak)]
)
def test_targets_with_sliding_windows(name: str, tmp_path: Path) -> None:
    """In half of the layers, or in all (Mistral): prefilled in chunks, preempted, and longer than the window."""
    (tiny,) = (each for each in FAMILIES if each.name == name)
    tiny.save(tmp_path / "target")
    layer_ids = (1, 2, 4)
    prompts = [prompt for prompt in demo_prompts(40) if len(prompt) < 250][:12]
    path = write_recipe(
        tmp_path,
        tmp_path / "target",
        prompts,
        ["Hello there"],
        extract={"max_tokens": 96, "max_num_seqs": 12, "layer_ids": list(layer_ids), "max_num_batched_tokens": 64},
        engine={"kv_cache_gib": 0.001},
    )
    run_extract(load_recipe(path), tmp_path / "run")
    log = (tmp_path / "run" / "store" / "engine.log").read_text()
    assert "preempt" in log.lower(), "the cache was large enough for all: the test tests nothing"
    model = reference_model(tmp_path / "target", torch.float32)
    store = Store(tmp_path / "run" / "store")
    assert len(store) == 13
    for sequence in store:
        expected = states_of(model, sequence.token_ids[: len(sequence.hidden_states)].long(), layer_ids)
        error = (sequence.hidden_states - expected).norm() / expected.norm()
        assert error < 1e-4


@pytest.fixture(scope="module", autouse=True)
def table() -> Any:
    """At the end, the table of families, printed and written."""
    yield
    lines = ["| family | `model_type` | hidden states | draft tokens | answers | |", "|---|---|---|---|---|---|"]
    for tiny in FAMILIES:
        if (row := ROWS.get(tiny.name)) is None:
            continue
        states = "by transformers only" if row.states is None else "equal"
        drafts = f"{row.compared} equal" if row.compared else "trained and converted" if row.trained else "none"
        lines.append(
            f"| {tiny.name} | `{tiny.model_type}` | {states} | {drafts} | {'identical' if row.same else 'not compared'} | {row.reason} |"
        )
    text = "\n".join(lines)
    print(f"\n{text}")
    finished = [name for name, row in ROWS.items() if row.same or (row.trained and name in NOT_HERE | NOT_SERVED)]
    if len(finished) == len(FAMILIES):
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
