"""What the store costs: bytes a token against plain bfloat16, and the time to write and to read it.

The states are real: SmolLM2-135M's own, from the demo's store where that is there and of this schema, else computed here
from the demo's prompts with transformers. They are stored as bfloat16, what a target on a GPU computes in.

Reading is compared with a plain sequential read of the very same files into one small buffer, in turns. "Cold" is after
the system was told to drop the files from its memory, which is how a store larger than memory is read; "warm" is with all
of it in memory, where a plain read costs next to nothing.

What limits the default form is measured in the same turns: the longer of that plain read and of zstd's decompression alone, of
the same planes, already in memory, by as many threads as read. Putting planes together, checksums and packing are ours.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zstandard

from draftsmith.config.loading import load_recipe
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.prefetch import prefetched
from draftsmith.store.codec import Form, _raw_sizes, encode
from draftsmith.store.format import Sequence, StoreIdentity
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.train.packing import pack_epoch
from tests.benchmarks.figures import Figure, figure

RUNS, TOKENS, TOKENS_PER_STEP, COPIES = 7, 16_000, 2048, 4
FORMS: tuple[Form, ...] = ("none", "lossless", "int8")
UNCOMPRESSED_AT_LEAST = 0.8
DECODED_AT_LEAST = 0.5
"""Of what zstd alone takes: putting planes together takes the states through memory as often again."""


def store_costs() -> dict[str, Figure]:
    """`store.bytes_ratio`, `store.write_MBps`, `store.read_MBps` and `store.read_ratio` of the default form, lossless, and
    `store.read_ratio_uncompressed`; with a form's name behind, all forms' own.

    `store.read_ratio` is against what the disk and zstd allow, `store.read_ratio_uncompressed` against a sequential read.
    """
    sequences = _real_states()
    plain_mb = sum(s.hidden_states.nbytes for s in sequences) / 1e6
    results: dict[str, Figure] = {}
    Path("runs/bench").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="runs/bench") as folder:
        writes: dict[str, list[float]] = {form: [] for form in FORMS}
        for run in range(RUNS):
            for form in FORMS:
                directory = Path(folder) / f"{form}-{run}"
                writes[form].append(_seconds(lambda d=directory, f=form: _write(d, f, sequences)))  # type: ignore[misc]
        for form in FORMS:
            suffix = "" if form == "lossless" else f".{form}"
            ratio = _bytes_ratio(Path(folder) / f"{form}-0")
            results[f"store.bytes_ratio{suffix}"] = figure(
                [ratio], "ratio", "plain bfloat16", direction="lower", bar=None if form == "none" else 0.75
            )
            rates = [plain_mb / seconds for seconds in writes[form]]
            results[f"store.write_MBps{suffix}"] = _rate(rates, "nothing; fsync included")

            # Copies, so that opening the store is not what is timed.
            directory = Path(folder) / f"{form}-to-read"
            copies = [replace(s, sample_id=n * len(sequences) + s.sample_id) for n in range(COPIES) for s in sequences]
            _write(directory, form, copies)
            times: dict[str, list[float]] = {name: [] for name in ("cold", "cold plain", "warm", "warm plain", "zstd")}
            planes = COPIES * _compressed_planes(sequences) if form == "lossless" else []
            for _ in range(RUNS):
                times["zstd"].append(_seconds(lambda p=planes: _decompress(p)))  # type: ignore[misc]
                for name, work in (("", _deliver), (" plain", _read_plainly)):
                    _forget(directory)
                    times["cold" + name].append(_seconds(lambda w=work, d=directory: w(d)))  # type: ignore[misc]
                for name, work in (("", _deliver), (" plain", _read_plainly)):
                    times["warm" + name].append(_seconds(lambda w=work, d=directory: w(d)))  # type: ignore[misc]
            for kind in ("cold", "warm"):
                rates = [COPIES * plain_mb / seconds for seconds in times[kind]]
                against = f"nothing; {kind}"
                results[f"store.read_MBps{suffix}.{kind}"] = _rate(rates, against)
                ratios = [plain / ours for ours, plain in zip(times[kind], times[f"{kind} plain"], strict=True)]
                against = f"sequential read of the same files, {kind}"
                results[f"store.read_ratio.{form}.{kind}"] = figure(ratios, "ratio", against, direction="higher")
            if form == "lossless":
                limits = [max(pair) for pair in zip(times["cold plain"], times["zstd"], strict=True)]
                ratios = [limit / ours for ours, limit in zip(times["cold"], limits, strict=True)]
                speeds = [COPIES * plain_mb / statistics.median(times[name]) for name in ("cold plain", "zstd")]
                against = (
                    f"the slower of a sequential read of the same files, {speeds[0]:.0f} MB/s of plain states, and zstd alone, "
                    f"{speeds[1]:.0f} MB/s; cold"
                )
                results["store.read_ratio"] = figure(ratios, "ratio", against, direction="higher", bar=DECODED_AT_LEAST)
            if form == "none":
                cold = results["store.read_ratio.none.cold"]
                results["store.read_ratio_uncompressed"] = figure(
                    cold["runs"], "ratio", cold["against"], direction="higher", bar=UNCOMPRESSED_AT_LEAST
                )
    results["store.read_MBps"] = results["store.read_MBps.cold"]
    return results


def _rate(runs: list[float], against: str) -> Figure:
    return figure(runs, "MB/s of plain states", against, direction="higher")


def _bytes_ratio(directory: Path) -> float:
    store = Store(directory)
    return store.counts["bytes"] / store.plain_bytes


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _write(directory: Path, form: Form, sequences: list[Sequence]) -> None:
    directory.mkdir()
    first = sequences[0].hidden_states
    identity = StoreIdentity(
        target="bench",
        target_revision="",
        target_config_hash="",
        tokenizer_hash="",
        chat_template_hash=None,
        layer_ids=tuple(range(first.shape[1])),
        hidden_size=first.shape[2],
        dtype="bfloat16",
        sampling={},
        states="int8" if form == "int8" else "exact",
    )
    writer = StoreWriter(directory, identity, shard_tokens=8192, compression=form)
    for sequence in sequences:
        writer.append(sequence)
    writer.close()


def _deliver(directory: Path) -> None:
    """As the trainer reads: opened, shuffled, every byte checked, step by step ahead of whoever computes."""
    store = Store(directory)
    lengths = [store.length(row) for row in range(len(store))]
    steps = pack_epoch(lengths, tokens_per_step=TOKENS_PER_STEP, seed=0, epoch=0)
    for _ in prefetched(lambda rows: list(store.read(rows)), steps):
        pass


def _compressed_planes(sequences: list[Sequence]) -> list[list[tuple[memoryview, int]]]:
    """Of each sequence's lossless frame, the planes that zstd has to decompress, each with its size before."""
    found = []
    for sequence in sequences:
        states = sequence.hidden_states
        frame = encode(states, "lossless")
        raw_sizes = _raw_sizes("lossless", states.shape, states.element_size())
        sizes = frame[: 4 * len(raw_sizes)].cast("I").tolist()
        planes, start = [], 4 * len(raw_sizes)
        for size, raw_size in zip(sizes, raw_sizes, strict=True):
            if size != raw_size:
                planes.append((frame[start : start + size], raw_size))
            start += size
        found.append(planes)
    return found


def _decompress(frames: list[list[tuple[memoryview, int]]]) -> None:
    def one(planes: list[tuple[memoryview, int]]) -> None:
        decompressor = zstandard.ZstdDecompressor()
        for plane, size in planes:
            decompressor.decompress(plane, max_output_size=size)

    with ThreadPoolExecutor(max_workers=2) as pool:  # as many as `prefetched` has
        list(pool.map(one, frames))


def _read_plainly(directory: Path) -> None:
    buffer = bytearray(1 << 20)
    for file in sorted(directory.glob("shard-*")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def _forget(directory: Path) -> None:
    """Drop the files from the system's memory, those parts that nobody maps."""
    for file in directory.glob("shard-*"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _real_states() -> list[Sequence]:
    recipe = load_recipe("recipes/demo.yaml")
    found: Iterable[Sequence]
    try:
        found = Store(Path("runs/demo/store"))
    except DraftsmithError:  # none there, or one of another schema: not this benchmark's business
        found = _computed_states(recipe)
    taken: list[Sequence] = []
    for sequence in found:
        states = sequence.hidden_states.bfloat16()
        taken.append(Sequence(len(taken), False, sequence.token_ids, sequence.loss_mask, states))
        if sum(len(s.hidden_states) for s in taken) >= TOKENS:
            break
    return taken


def _computed_states(recipe: Any) -> Iterator[Sequence]:
    """The demo's prompts through the target: states at layers like those that the demo's store has."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from draftsmith.data.prompts import load_prompts
    from draftsmith.target.prepare import prepare_target

    path = prepare_target(recipe.target)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    layers = model.config.num_hidden_layers
    for prompt in load_prompts(recipe.extract.prompts):
        ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        chosen = torch.stack([states[i][0] for i in (2, layers // 2, layers - 3, layers - 1)], dim=1)
        yield Sequence(0, False, torch.tensor(ids, dtype=torch.int32), torch.ones(len(ids), dtype=torch.bool), chosen)
