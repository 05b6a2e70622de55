"""What saving hidden states costs the engine: extraction against plain vLLM on the same prompts, SmolLM2-135M, float32.

Both engines are alive at once, in processes of their own, and take turns. What limits extraction is the target's own
forward pass; the states themselves are 9 kB a token in and out of memory, next to 540 MB of weights a step.

`extract.memory_growth` extracts 200k tokens with a tiny target, so that it is over in minutes: what could grow (requests,
handoff files, shards) does not know how large the target is.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.data.chat_template import Renderer
from draftsmith.data.prompts import load_prompts
from draftsmith.extract import worker as worker_module
from draftsmith.extract.extract import run_extract
from draftsmith.extract.job import Job, engine_job, store_identity
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.worker import _Storage, _Worker, _Written
from draftsmith.run.process import disable_malloc_trim
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, start_engines
from draftsmith.store.codec import Form
from draftsmith.store.writer import StoreWriter
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.layer_ids import default_layer_ids
from draftsmith.target.prepare import prepare_target
from tests.benchmarks.figures import Figure, figure

PROMPTS, ANSWER, AT_ONCE, PREFILL_PROMPTS = 96, 32, 32, 576
"""Several times as many prompts as run at once: an extraction goes on for hours, and its end, when the last states are checked,
compressed and synced beside an idle engine, must not be a tenth of what is timed. Prefill is done with 32 prompts in one step, so
it has more of them: the end takes 0.3 s."""
STARTS, RUNS, PREFILLS = 4, 1, 1
"""An engine is faster or slower by a tenth from one start to the next, for all its life, so what counts is the number of
starts. Prefill is compared in a round more of its own."""
SHARD_TOKENS = 2048
"""A quarter of a recipe's, so that shards are written beside the engine in a run of some thousand tokens too."""
CACHE_GIB = 2
"""Every engine's, a recipe's default. A finished sequence's blocks are kept until its states are written, a step or two, and with
half a GiB extraction was slower by that (docs/log.md)."""
MEMORY_TOKENS = 200_000
UNCOMPRESSED = 1_000_000
"""Sample ids from here on are of requests whose states come back uncompressed, from the same engine."""


def extraction_ratios() -> dict[str, Figure]:
    """`extract.prefill_ratio`, `extract.onepass_ratio`, `extract.onepass_time_ratio`, `extract.compression_ratio`.

    Extraction is timed to the end: states checked, compressed and on disk as a store.
    """
    from transformers import AutoTokenizer

    options = [f"extract.max_num_seqs={AT_ONCE}", f"engine.kv_cache_gib={CACHE_GIB}"]
    recipe = load_recipe(Path("recipes/demo.yaml"), options)
    target = describe_target(prepare_target(recipe.target), recipe.target)
    renderer = Renderer(AutoTokenizer.from_pretrained(target.path))
    prompts = [renderer.prompt(prompt) for prompt in load_prompts(recipe.extract.prompts)[:PREFILL_PROMPTS]]
    layer_ids = default_layer_ids(target.num_hidden_layers)
    times: dict[str, list[float]] = {}
    for start in range(STARTS):
        for name, seconds in _times_of_a_start(recipe, target, prompts, layer_ids, plain_first=start % 2 == 0).items():
            times.setdefault(name, []).extend(seconds)
    columns = {name: torch.tensor(seconds) for name, seconds in times.items()}
    return {
        "extract.prefill_ratio": _ratio(columns["plain"] / columns["prefill"], "plain vLLM prefill", at_least=0.95),
        "extract.onepass_ratio": _ratio(columns["answers"] / columns["onepass"], "plain vLLM generation", at_least=0.92),
        "extract.onepass_time_ratio": figure(
            (columns["onepass"] / (columns["answers"] + columns["texts"])).tolist(), "ratio",
            "generation, then prefill extraction", direction="lower", bar=0.75,
        ),
        "extract.compression_ratio": _ratio(
            columns["uncompressed"] / columns["onepass"], "extraction without compression", at_least=0.97
        ),
    }  # fmt: skip


def _times_of_a_start(
    recipe: Recipe, target: TargetInfo, prompts: list[list[int]], layer_ids: tuple[int, ...], *, plain_first: bool
) -> dict[str, list[float]]:
    """Seconds of each taker in each of its rounds, by engines started for it one after the other.

    Which comes first may matter, so it is not the same one every time.
    """
    identity = store_identity(recipe, target, layer_ids)
    times: dict[str, list[float]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as `run_extract` does while engines run
    disable_malloc_trim()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineSpec(
            name="plain", target=str(target.path), dtype=recipe.target.dtype, engine=recipe.engine, max_num_seqs=AT_ONCE
        )
        started: list[EngineHost] = []
        workers: dict[bool, _Worker] = {}

        def store_of(generate: bool) -> Path:
            return Path(folder) / str(generate) / "store"

        def start_plain() -> None:
            started.extend(start_engines([config], Path(folder)))

        def start_worker(generate: bool) -> None:
            job = replace(
                engine_job(recipe, target, identity, 2 << 30),
                generate=generate,
                sampling={"temperature": 0.0, "detokenize": False},
                seed=0,
                compression="lossless",
                window=2 * PREFILL_PROMPTS,
                shard_tokens=SHARD_TOKENS,
            )
            directory = Path(folder) / str(generate)
            store_of(generate).mkdir(parents=True)
            with mock.patch.object(worker_module, "_child", _child_of_two_forms):
                workers[generate] = _Worker(
                    0, 1, job, recipe.engine, directory, directory / "handoff", store_of(generate)
                )
            workers[generate].receive()  # it is ready

        starts = [start_plain, partial(start_worker, False), partial(start_worker, True)]
        for start in starts if plain_first else reversed(starts):
            start()
        (plain,) = started
        try:
            asked = prompts[:PROMPTS]
            answers, _ = plain.generate(asked, max_tokens=ANSWER)
            texts = [ids + answer.token_ids for ids, answer in zip(asked, answers, strict=True)]

            def extracting(generate: bool, inputs: list[list[int]], form: Form) -> float:
                for left in store_of(generate).iterdir():
                    left.unlink()
                writer = StoreWriter(store_of(generate), identity, shard_tokens=SHARD_TOKENS, compression=form)
                return _round(workers[generate], writer, inputs, ANSWER if generate else 1, form)

            arms = {
                "plain": lambda: plain.generate(prompts, max_tokens=1)[1],
                "prefill": lambda: extracting(False, prompts, "lossless"),
                "texts": lambda: extracting(False, texts, "lossless"),
                "answers": lambda: plain.generate(asked, max_tokens=ANSWER)[1],
                "onepass": lambda: extracting(True, asked, "lossless"),
                "uncompressed": lambda: extracting(True, asked, "none"),
            }
            prefill = {name: arms[name] for name in ("plain", "prefill")}
            for run, takers in enumerate([arms] * (RUNS + 1) + [prefill] * PREFILLS):
                # In turns forward and backward: whoever comes after a rest, or after another, has no advantage.
                order = list(takers) if (run + plain_first) % 2 else list(reversed(takers))
                found = {name: takers[name]() for name in order}
                print(run, {k: round(v, 2) for k, v in found.items()}, flush=True)
                if (
                    run
                ):  # the first warms up, every arm on all of its prompts: an engine's cache is faulted in as it is used
                    for name, seconds in found.items():
                        times.setdefault(name, []).append(seconds)
        finally:
            torch.set_num_threads(threads)
            plain.close()
            for worker in workers.values():
                worker.close()
    return times


def memory_growth() -> dict[str, Figure]:
    """`extract.memory_growth`: peak memory of driver and worker in the second half of a long extraction over the first's."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    demo = load_recipe(Path("recipes/demo.yaml"))
    tokenizer = AutoTokenizer.from_pretrained(prepare_target(demo.target))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=len(tokenizer),
            max_position_embeddings=1024,
        )
        LlamaForCausalLM(config).save_pretrained(directory / "target")
        tokenizer.save_pretrained(directory / "target")
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(100, 500, (MEMORY_TOKENS // 300,), generator=generator).tolist()
        rows = [
            json.dumps({"input_ids": torch.randint(20, 40_000, (n,), generator=generator).tolist()}) for n in lengths
        ]
        (directory / "rows.jsonl").write_text("\n".join(rows) + "\n")
        recipe = Recipe.model_validate({
            "name": "memory",
            "target": {"model": str(directory / "target"), "dtype": "float32"},
            "engine": {"max_model_len": 1024, "kv_cache_gib": 0.3},
            "extract": {
                "prompts": {"path": str(directory / "rows.jsonl")}, "held_out_fraction": 0.0, "mode": "prefill",
                "max_num_seqs": 32,
            },
        })  # fmt: skip
        samples: list[tuple[float, int]] = []
        done = threading.Event()

        def watch() -> None:
            driver = psutil.Process()
            while not done.wait(0.1):
                used = 0
                for process in (driver, *driver.children(recursive=True)):
                    try:
                        used += process.memory_info().rss
                    except psutil.Error:
                        continue
                shards = sum(1 for _ in (directory / "run" / "store").glob("shard-*"))
                if shards:  # the engine is up and has begun
                    samples.append((time.monotonic(), used))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            figures = run_extract(recipe, directory / "run")
        finally:
            done.set()
            watcher.join()
    middle = (samples[0][0] + samples[-1][0]) / 2
    first = max(used for at, used in samples if at <= middle)
    second = max(used for at, used in samples if at > middle)
    return {
        "extract.memory_growth": figure(
            [second / first], "ratio", f"the first half's peak, {first / 2**30:.2f} GiB; {figures['tokens']} tokens",
            direction="lower", bar=1.05,
        )
    }  # fmt: skip


def _round(worker: _Worker, writer: StoreWriter, inputs: list[list[int]], max_tokens: int, form: Form) -> float:
    """Seconds from handing out the inputs until the store with their states is closed."""
    first = UNCOMPRESSED if form == "none" else 0
    begun = time.perf_counter()
    worker.give([ExtractRequest(first + i, False, ids, max_tokens) for i, ids in enumerate(inputs)])
    while worker.in_flight:
        message = worker.receive()
        if isinstance(message, _Written):
            writer.adopt(message.shard)
    writer.close()
    return time.perf_counter() - begun


def _child_of_two_forms(pipe: Connection, job: Job, handoff: Path, store: Path) -> None:
    """A worker that returns the states of some requests uncompressed (`UNCOMPRESSED`)."""
    sampling = worker_module._sampling

    def sampling_of(job: Job, turn: Any) -> Any:
        return sampling(replace(job, compression=_form(turn)), turn)

    worker_module._sampling = sampling_of
    worker_module._Storage = _StorageOfTwoForms
    worker_module._child(pipe, job, handoff, store)


def _form(turn: Any) -> Form:
    return "none" if turn.request.sample_id >= UNCOMPRESSED else "lossless"


class _StorageOfTwoForms:
    def __init__(self, job: Job, *given: Any) -> None:
        forms: tuple[Form, ...] = ("lossless", "none")
        self._by_form = {form: _Storage(replace(job, compression=form), *given) for form in forms}

    def store(self, turn: Any, prompt_loss_mask: list[bool]) -> None:
        self._by_form[_form(turn)].store(turn, prompt_loss_mask)

    def flush(self) -> None:
        for one in self._by_form.values():
            one.flush()

    def close(self) -> None:
        for one in self._by_form.values():
            one.close()


def _ratio(ratios: torch.Tensor, against: str, *, at_least: float) -> Figure:
    return figure(ratios.tolist(), "ratio", against, direction="higher", bar=at_least)
