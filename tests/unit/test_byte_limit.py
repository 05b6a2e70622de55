"""What waits in memory for a disk is limited in bytes, whatever the lengths of sequences; one that is larger goes alone."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.config.recipe import Recipe
from draftsmith.extract import job, worker
from draftsmith.extract.byte_limit import ByteLimit
from draftsmith.extract.handoff import HandoffWriter, take_handoff_file
from draftsmith.extract.requests import ExtractRequest
from draftsmith.store.codec import encode_states
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from tests.unit.test_connector import (
    BLOCK_SIZE,
    BLOCKS,
    HIDDEN,
    LAYERS,
    connector,
    slots,
    some_states,
    states_connector,
)
from tests.unit.test_extraction_workers import JOB
from tests.unit.test_store import identity

LENGTHS = [1, 2, 1, 28, 1, 3, 1, 1, 28, 28, 5, 1, 1, 9, 2, 1, 28, 4, 4, 4]
"""Tokens; the longest are above the limits here."""


def require_limited(waiting: list[int], limit: int) -> None:
    """
    Args:
        waiting: bytes of each that waits, as seen at some moment.
    """
    assert sum(waiting) <= limit or len(waiting) == 1


def test_many_threads() -> None:
    limit, lock = ByteLimit(10), threading.Lock()
    inside: list[int] = []
    most: list[int] = []

    def one(size: int) -> None:
        limit.take(size)
        with lock:
            inside.append(size)
            most.append(sum(inside))
            require_limited(inside, 10)
        time.sleep(0.0005)
        with lock:
            inside.remove(size)
        limit.give_back(size)

    chooser = random.Random(0)
    sizes = [chooser.choice([1, 2, 3, 9, 10, 11, 1000]) for _ in range(300)]
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(one, size) for size in sizes]:
            done.result(30)
    assert max(size for size in most if size <= 10) > 3, "several at once"
    assert max(most) == 1000


def test_an_engine_waits_for_its_files(tmp_path: Path) -> None:
    """The connector on a CPU, with a disk that takes its time."""
    token = LAYERS * HIDDEN * 4
    limit = 10 * token
    ours = states_connector(tmp_path)
    blocks = list(range(BLOCKS))
    ours.take(slots(blocks, range(BLOCKS * BLOCK_SIZE)), some_states(BLOCKS * BLOCK_SIZE))
    ours._unwritten = ByteLimit(limit)
    writer = HandoffWriter(tmp_path, reuse_files=False)

    def slowly(*given: Any) -> None:
        time.sleep(0.003)
        writer.write(*given)

    ours._writer = SimpleNamespace(write=slowly)
    seen: list[int] = []
    for number, length in enumerate(LENGTHS):
        save = connector._Save(str(number), f"{number}.safetensors", [7] * length, blocks, "none")
        ours._running[save.request_id] = save, ours._start_writing(save)
        waiting = [LENGTHS[int(name)] * token for name, (_, writing) in ours._running.items() if not writing.done()]
        seen.append(len(waiting))
        require_limited(waiting, limit)
    for _, writing in ours._running.values():
        writing.result(30)
    assert max(seen) >= 3, "short ones do not wait for one another"
    shapes = [take_handoff_file(tmp_path / f"{number}.safetensors")[1].shape for number in range(len(LENGTHS))]
    assert shapes == [(length, LAYERS, HIDDEN) for length in LENGTHS]
    assert max(LENGTHS) == BLOCKS * BLOCK_SIZE


def test_an_engine_waits_for_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's thread that moves handoff files into shards takes its time."""
    handoff, store = tmp_path / "handoff", tmp_path / "store"
    handoff.mkdir()
    store.mkdir()
    writer = HandoffWriter(handoff, reuse_files=True)
    written: list[Any] = []
    finished: list[int] = []

    def send(message: Any) -> None:
        if isinstance(message, worker._Written):
            written.append(message.shard)
        else:
            finished.append(message.tokens)

    def slowly(path: Path) -> Any:
        time.sleep(0.002)
        return take_handoff_file(path)

    monkeypatch.setattr(worker, "take_handoff_file", slowly)
    failures: list[BaseException] = []
    limit = 3000  # of files, which have a head of some hundred bytes
    wide = identity(layer_ids=(1,), hidden_size=32)
    about = replace(JOB, identity=wide, max_unstored_bytes=limit)
    adopting = StoreWriter(store, wide, shard_tokens=1, compression=about.compression)
    storage = worker._Storage(about, handoff, store, send, failures.append)
    sizes: list[int] = []
    waited: list[int] = []
    for number, length in enumerate(LENGTHS):
        turn = worker._Turn(ExtractRequest(number, False, [1] * length, 4), 0, [1] * length, None, [length])
        writer.write(turn.file, turn.prompt_token_ids, encode_states(torch.randn(length, 1, 32), about.compression))
        sizes.append((handoff / turn.file).stat().st_size)
        storage.store(turn, [False] * length)
        waiting = sizes[len(finished) :]
        waited.append(len(waiting))
        require_limited(waiting, limit)
    storage.flush()
    while len(finished) < len(LENGTHS) or sum(shard.sequences for shard in written) < len(LENGTHS):
        assert not failures
        time.sleep(0.01)
    storage.close()
    assert max(sizes) > limit
    assert max(waited) >= 3, "short ones do not wait for one another"
    for shard in written:
        adopting.adopt(shard)
    adopting.close()
    assert [len(sequence.hidden_states) for sequence in Store(store)] == LENGTHS


def test_a_limit_for_every_size_of_states() -> None:
    """Small states may fill what the handoff folder has room for beside those of a step, large ones a GiB for each engine."""
    sections = {"name": "n", "target": {"model": "owner/name"}}
    recipe = Recipe.model_validate(
        sections | {"extract": {"prompts": {"path": "p"}, "compression": "none", "max_num_seqs": 8, "workers": 2}}
    )
    assert job.sequences_in_a_step(recipe.extract) == 16
    for hidden_size, tokens in ((64, 100), (8192, 32_768)):
        about = identity(layer_ids=(1, 2, 3, 4), hidden_size=hidden_size, dtype="bfloat16")
        step = 16 * tokens * 4 * hidden_size * 2
        room = job.handoff_bytes(recipe, about, tokens=16 * tokens)
        assert room == pytest.approx(step + min(step, 2 << 30), rel=0.05)
        limit = job.max_unstored_bytes(recipe, room)
        assert limit == pytest.approx(min(step / 2, 1 << 30), rel=0.05)
