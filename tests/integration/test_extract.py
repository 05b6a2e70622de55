"""Extraction with a real engine and the real target: the states are true, and a killed run is continued."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.extract.extract import run_extract
from draftsmith.run import stage
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.store.reader import Store
from tests.integration.conftest import (
    check_same,
    demo_prompts,
    extract_conversations,
    make_target,
    reference_states,
    write_recipe,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("mode", ["generate", "prefill"])
def test_states_are_true(mode: str, smollm2: Path, tmp_path: Path) -> None:
    # Prompts of different lengths in one batch; the longest is prefilled in several chunks of 64 tokens.
    prompts = [*demo_prompts(6), "Summarise this: " + " ".join(demo_prompts(12))[:1200], "Hi"]
    options = {"mode": mode, "layer_ids": [0, 2, 15, 27, 30], "max_num_batched_tokens": 64, "max_num_seqs": 4}
    recipe = load_recipe(
        write_recipe(tmp_path, smollm2, prompts[:-1], prompts[-1:], extract={"max_tokens": 24} | options)
    )
    run_extract(recipe, tmp_path / "run")

    store = Store(tmp_path / "run" / "store")
    check_states(store, smollm2, prompts, mode)
    if mode == "generate":
        _check_transformers_backend(recipe, store, tmp_path)


def test_sampled_answers_do_not_depend_on_how_prompts_are_read(tmp_path: Path) -> None:
    """A prompt that vLLM reads in several steps, beside others, gets the answer of its seed."""
    make_target(tmp_path / "target")
    prompts = ["Hi", "Summarise this: " + " ".join(demo_prompts(12))[:300], "Why?"]
    answers = []
    for tokens_at_once in (16, 512):
        options = {"layer_ids": [1, 3], "temperature": 0.9, "max_num_batched_tokens": tokens_at_once}
        run_dir = tmp_path / str(tokens_at_once)
        recipe = write_recipe(tmp_path, tmp_path / "target", prompts, ["Hello"], extract={"max_num_seqs": 2} | options)
        run_extract(load_recipe(recipe), run_dir)
        store = Store(run_dir / "store")
        assert max(store.length(i) for i in range(len(store))) > 64
        answers.append({one.sample_id: one.token_ids.tolist() for one in store})
    assert len(answers[0]) == 4
    assert answers[0] == answers[1]


def check_states(store: Store, target: Path, prompts: list[str], mode: str) -> None:
    """A store's states are transformers' own, those of every prompt and nothing else, the last one held out; generated answers
    are the target's greedy ones."""
    assert len(store) == len(prompts), "the last sequence to finish is there too"
    assert len(store.rows(held_out=True)) == 1
    assert max(store.length(i) for i in range(len(store))) > 200, "one prompt must be longer than a batch"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    asked = {
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False
            )
        )
        for p in prompts
    }
    for sequence in store:
        inputs = sequence.token_ids[: len(sequence.hidden_states)]
        expected = reference_states(model, inputs, store.identity.layer_ids)
        for column, layer in enumerate(store.identity.layer_ids):
            found, wanted = sequence.hidden_states[:, column], expected[:, column]
            error = (found - wanted).norm() / wanted.norm()
            assert error < 1e-4, f"layer id {layer}: relative error {error:.2e}"
        if mode == "generate":
            prompt = tuple(sequence.token_ids[~sequence.loss_mask].tolist())
            # The response is the target's own greedy one: each token is the argmax at the position before it.
            with torch.no_grad():
                best = model(inputs[None].long()).logits[0, len(prompt) - 1 :].argmax(-1)
            assert torch.equal(best.int(), sequence.token_ids[sequence.loss_mask])
        else:
            prompt = tuple(sequence.token_ids.tolist())
        assert prompt in asked


def _check_transformers_backend(recipe: Recipe, store: Store, folder: Path) -> None:
    """Extraction without vLLM writes the same store, but for the order of sums."""
    options = recipe.extract.model_copy(update={"backend": "transformers"})
    run_extract(recipe.model_copy(update={"extract": options}), folder / "transformers")
    reference = Store(folder / "transformers" / "store")
    assert len(store) == len(reference)
    for a, b in zip(store, reference, strict=True):
        assert (a.sample_id, a.held_out) == (b.sample_id, b.held_out)
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.loss_mask, b.loss_mask)
        error = (a.hidden_states - b.hidden_states).norm(dim=(0, 2)) / b.hidden_states.norm(dim=(0, 2))
        assert (error < 1e-4).all(), f"relative error by layer: {error}"


def _manifest(run_dir: Path) -> dict:
    path = run_dir / "store" / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {"shards": []}


@pytest.mark.usefixtures("every_core")
def test_killed_at_random_moments_it_is_continued(tmp_path: Path) -> None:
    """Two engines, killed with their driver as they start, again between two shards, and then one of them alone: the store is
    what one engine makes, never interrupted. The moments are others in every run of the tests."""
    make_target(tmp_path / "target")
    path, uninterrupted = extract_conversations(tmp_path, tmp_path / "target", samples=12, layer_ids=[1, 2, 3])
    sequences = len(Store(uninterrupted / "store"))
    assert sequences == 7 * 12 + 1
    command = [sys.executable, "-m", "draftsmith.cli", "extract", str(path), "--runs", str(tmp_path)]
    command += ["-s", "extract.workers=2"]
    run_dir, chooser = tmp_path / "test", random.Random(seed := random.randrange(10_000))
    print(f"moments drawn with seed {seed}")
    deadline = time.monotonic() + 300

    def wait_for(shards: int, process: subprocess.Popen) -> None:
        while len(_manifest(run_dir)["shards"]) < shards:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)

    for moment in ("starting", "extracting"):
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        if moment == "starting":
            time.sleep(8 * chooser.random())
        else:
            wait_for(chooser.randint(1, 4), process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert stage.read(run_dir / "store") is None
    kept = len(_manifest(run_dir)["shards"])
    assert 1 <= len(Store(run_dir / "store")) < sequences

    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(kept + 1, process)
    family = psutil.Process(process.pid).children(recursive=True)
    (server,) = (child for child in family if child.ppid() == process.pid and "forkserver" in " ".join(child.cmdline()))
    workers = server.children()
    assert len(workers) == 2, [child.cmdline() for child in family]
    workers[0].kill()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "The other engines take over" in said
    assert not (run_dir / "store" / "handoff").exists()
    check_same(run_dir / "store", uninterrupted / "store")

    # Another run does nothing; a recipe for something else is refused, with the difference shown.
    before = (run_dir / "store" / "stage.json").read_bytes()
    recipe = load_recipe(path)
    run_extract(recipe, run_dir)
    assert (run_dir / "store" / "stage.json").read_bytes() == before
    other = load_recipe(path, ["extract.layer_ids=[1, 3]"])
    with pytest.raises(UserError, match=r"layer_ids is \(1, 2, 3\) there and \(1, 3\) in this run"):
        run_extract(other, run_dir)
    with pytest.raises(UserError, match=r"for something else: sampling\.seed is 0 there and 5 in this run\."):
        run_extract(load_recipe(path, ["seed=5"]), run_dir)
    with pytest.raises(UserError, match="other prompts"):
        run_extract(load_recipe(path, ["extract.prompts.limit=3"]), run_dir)


def test_conversations_are_answered_turn_by_turn(smollm2: Path, whole: tuple[Path, Path]) -> None:
    """And sampled."""
    store, tokenizer = Store(whole[1] / "store"), AutoTokenizer.from_pretrained(smollm2)
    answers = []
    for sequence in store:
        mask, text = sequence.loss_mask, tokenizer.decode(sequence.token_ids)
        assert "not used" not in text, "the target answers itself"
        begins = (mask & ~torch.cat([torch.tensor([False]), mask[:-1]])).sum()
        assert begins == text.count("<|im_start|>user"), "every answer is learned, the earlier ones too"
        answers.append(tokenizer.decode(sequence.token_ids[mask]))
    assert len(set(answers)) == len(answers), "samples differ"
    assert any(answer.rstrip().endswith(".") for answer in answers), "a stop text ends answers"


def test_a_target_that_overflows_is_not_stored(tmp_path: Path) -> None:
    target = tmp_path / "target"
    make_target(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.model.layers[1].mlp.down_proj.weight.data.fill_(3e38)
    model.save_pretrained(target)
    path = write_recipe(
        tmp_path, target, demo_prompts(2), ["Hello there"], extract={"max_tokens": 4, "layer_ids": [1, 3]}
    )
    with pytest.raises(DraftsmithError, match=r"states are not all finite.*request \d+.*`target.dtype`"):
        run_extract(load_recipe(path), tmp_path / "run")
    assert Store(tmp_path / "run" / "store").counts["sequences"] == 0


def test_preempted_sequences_keep_their_states(tmp_path: Path) -> None:
    """A KV cache that holds a few sequences and not all: vLLM takes blocks away and computes again."""
    make_target(tmp_path / "target")
    options = {"max_tokens": 96, "max_num_seqs": 12, "layer_ids": [1, 3]}
    path = write_recipe(
        tmp_path,
        tmp_path / "target",
        demo_prompts(12),
        ["Hello there"],
        extract=options,
        engine={"kv_cache_gib": 0.0015},
    )
    run_extract(load_recipe(path), tmp_path / "small")
    log = (tmp_path / "small" / "store" / "engine.log").read_text()
    assert "preempt" in log.lower(), "the cache was large enough for all: the test tests nothing"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    for sequence in Store(tmp_path / "small" / "store"):
        expected = reference_states(model, sequence.token_ids[: len(sequence.hidden_states)], (1, 3))
        error = (sequence.hidden_states - expected).norm() / expected.norm()
        assert error < 1e-4
