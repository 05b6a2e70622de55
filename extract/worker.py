"""Extraction workers: vLLM engines in child processes that take requests and write shards of the store.

Child processes, because an engine's environment (OpenMP, its cores or GPUs) has to be set as its process starts, and
because an engine that dies must not take the driver with it. Inside a child the engine runs in-process: vLLM's own engine
process would occupy a CPU core for scheduling.

The driver hands out requests as workers ask for more, so that the data set is never in memory as a whole, and a fast worker
gets more. A worker moves finished requests' states from handoff files into shards, and reports each shard that it has
written. A dead worker's requests that are in no such shard go to the others.
"""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftsmith.config.recipe import EngineConfig
from draftsmith.data.chat_template import Unrenderable
from draftsmith.data.conversations import Conversation
from draftsmith.data.images import image_bytes
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.engine.environment import float32_environment, share_of_machine
from draftsmith.engine.process import EngineFailed, EngineProcess
from draftsmith.extract.byte_limit import ByteLimit
from draftsmith.extract.handoff import handoff_file, take_handoff_file
from draftsmith.extract.job import Job
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.sequences import Extracted, checked
from draftsmith.run.process import disable_malloc_trim, lower_priority
from draftsmith.run.progress import console
from draftsmith.store.format import Shard
from draftsmith.store.writer import BackgroundShards, ShardMaker
from draftsmith.target.pretrained import tokenizer_of

if TYPE_CHECKING:
    from vllm import LLM

_FLUSH_SECONDS = 60.0
"""How long the last requests' states may take to arrive, with no other file arriving meanwhile."""
_POLL_SECONDS = 1.0
"""Time between two looks for new requests after there were none, even if no worker reports anything."""
_IDLE_SECONDS = 0.05
"""Time without a request in flight after which the open shard is written: there may be no more."""


class Progress(NamedTuple):
    """What has become of a machine's requests."""

    shard: Shard | None
    """A shard that has just been written; None where a request has just finished."""
    unwritten_sequences: int
    """Finished requests that are in no shard yet. They go back to being unfinished if their worker dies."""
    unwritten_tokens: int


class _Room(NamedTuple):
    """Requests that the worker has room for, in addition. Worker to driver."""

    requests: int


class _Finished(NamedTuple):
    """A request is finished and checked. Worker to driver."""

    tokens: int
    """With states."""


class _Written(NamedTuple):
    """A shard is written. Worker to driver."""

    shard: Shard
    sample_ids: list[int]


def run_engines(
    job: Job,
    requests: Iterable[ExtractRequest | None],
    engine: EngineConfig,
    *,
    num_workers: int,
    logs: Path,
    handoff: Path,
    store: Path,
) -> Generator[Progress, None, None]:
    """Run a job on several engines of this machine. Ends when all requests are in shards, which the caller has to adopt.

    Args:
        requests: read as engines have room. None means that there are none at the moment; it must not come while every
            request is in a shard: the iterator then has to wait for the next request, or end.
        num_workers: engines. A CPU's cores and a machine's GPUs are divided among them.
        logs: a folder.
        handoff: an empty folder for handoff files.
        store: the store's folder. Shard files have names of their own in it.

    Raises:
        EngineFailed: every engine failed; with the end of the last one's log.
    """
    pending = iter(requests)
    returned: deque[ExtractRequest] = deque()  # of workers that died
    workers = [
        _Worker(number, num_workers, job, engine, logs, handoff / str(number), store) for number in range(num_workers)
    ]

    def hand_out(worker: _Worker) -> None:
        batch: list[ExtractRequest] = []
        while len(batch) < worker.room:
            request = returned.popleft() if returned else next(pending, None)
            if request is None:
                break
            batch.append(request)
        worker.give(batch)

    try:
        while workers:
            for pipe in wait([worker.process.pipe for worker in workers], timeout=_POLL_SECONDS):
                (worker,) = (one for one in workers if one.process.pipe is pipe)
                try:
                    message = worker.receive()
                except EngineFailed as error:
                    workers.remove(worker)
                    worker.close()
                    if not workers:
                        raise
                    returned.extend(worker.in_flight.values())
                    console.print(f"extract: {error}\nThe other engines take over.", style="yellow", markup=False)
                    continue
                if not isinstance(message, _Room):
                    yield Progress(
                        message.shard if isinstance(message, _Written) else None,
                        sum(one.unwritten_sequences for one in workers),
                        sum(one.unwritten_tokens for one in workers),
                    )
            for worker in workers:
                hand_out(worker)
            if all(worker.room and not worker.in_flight for worker in workers):
                return  # every worker had room for more and there was none
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """The driver's side of one engine."""

    def __init__(
        self, number: int, num_workers: int, job: Job, engine: EngineConfig, logs: Path, handoff: Path, store: Path
    ) -> None:
        self.room = 0
        """Requests that it could take now."""
        self.in_flight: dict[int, ExtractRequest] = {}
        """By sample id: its requests that are in no shard."""
        self.unwritten_sequences = self.unwritten_tokens = 0
        """Those of them that are finished."""
        self._handoff = handoff
        handoff.mkdir()
        self.process = EngineProcess(
            _child,
            (job, handoff, store),
            name=f"extraction-{number}",
            engine=engine,
            log=logs / (f"engine-{number}.log" if num_workers > 1 else "engine.log"),
            variables=share_of_machine(number, num_workers, engine)
            | float32_environment(job.engine_arguments["dtype"]),
            advice="What was extracted so far is kept; run the stage again to continue.",
        )

    def give(self, requests: list[ExtractRequest]) -> None:
        if requests:
            self.in_flight |= {request.sample_id: request for request in requests}
            self.room -= len(requests)
            self.process.send(requests)

    def receive(self) -> _Room | _Finished | _Written:
        """Wait for the worker's next message.

        Raises:
            EngineFailed: the worker reported an error or ended.
        """
        message: _Room | _Finished | _Written = self.process.receive()
        if isinstance(message, _Room):
            self.room += message.requests
        elif isinstance(message, _Finished):
            self.unwritten_sequences += 1
            self.unwritten_tokens += message.tokens
        else:
            for sample_id in message.sample_ids:
                del self.in_flight[sample_id]
            self.unwritten_sequences -= message.shard.sequences
            self.unwritten_tokens -= message.shard.tokens
        return message

    def close(self) -> None:
        self.process.close()
        shutil.rmtree(self._handoff, ignore_errors=True)


# --- the child's side ---


def _child(pipe: Connection, job: Job, handoff: Path, store: Path) -> None:
    disable_malloc_trim()  # what encoding a sequence frees, encoding the next one needs
    from vllm import LLM

    connector = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "draftsmith.extract.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"handoff_directory": str(handoff.resolve()), "names_from_requests": True},
    }
    _work(LLM(**job.engine_arguments | {"kv_transfer_config": connector}), pipe, job, handoff, store)


@dataclass
class _Turn:
    """A user turn of a request, as the engine runs it."""

    request: ExtractRequest
    number: int
    prompt_token_ids: list[int]
    """Once it is answered, with the images' placeholders expanded."""
    conversation: Conversation | None
    response: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """vLLM's name for it."""
        return f"{self.request.sample_id}-{self.number}"

    @property
    def file(self) -> str:
        return handoff_file(self.request_id)


class _Storage:
    """Moves finished requests' states from handoff files into shards, in background threads.

    Args:
        send: sends a message to the driver, from any thread.
        fail: called with what a background thread raised.
    """

    def __init__(
        self, job: Job, handoff: Path, store: Path, send: Callable[[Any], None], fail: Callable[[BaseException], None]
    ) -> None:
        self._handoff, self._send, self._fail = handoff, send, fail
        self._path = store / f"shard-{secrets.token_hex(4)}"  # unique, also among workers of earlier drivers
        self._shards_written = 0
        self._shards = BackgroundShards(
            job.identity, job.compression, shard_tokens=job.shard_tokens, write=self._write_shard
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draftsmith-store", initializer=lower_priority)
        self._unstored = ByteLimit(job.max_unstored_bytes)

    def store(self, turn: _Turn, prompt_loss_mask: list[bool]) -> None:
        """Take an answered turn's handoff file and add its sequence to the open shard. Waits while too many are waiting."""
        size = (self._handoff / turn.file).stat().st_size
        self._unstored.take(size)
        self._submit(self._store, turn, prompt_loss_mask).add_done_callback(lambda _: self._unstored.give_back(size))

    def flush(self) -> None:
        """Have all that was given written: there may be no more."""
        self._submit(self._flush)

    def close(self) -> None:
        """Finish the shard that is being written and drop the open one."""
        self._thread.shutdown(cancel_futures=True)
        self._shards.close()

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        future = self._thread.submit(work, *arguments)
        future.add_done_callback(self._report)
        return future

    def _report(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._fail(error)

    def _store(self, turn: _Turn, prompt_loss_mask: list[bool]) -> None:
        saved, states = take_handoff_file(self._handoff / turn.file)
        sequence = checked(
            Extracted(turn.request, turn.prompt_token_ids, prompt_loss_mask, turn.response, saved, states)
        )
        self._send(_Finished(states.shape[0]))
        self._shards.add(sequence)

    def _flush(self) -> None:
        self._shards.flush()
        self._shards.wait()

    def _write_shard(self, full: ShardMaker) -> None:
        sample_ids = full.sample_ids
        path = self._path.with_name(f"{self._path.name}-{self._shards_written:05d}.safetensors")
        self._shards_written += 1
        self._send(_Written(full.write(path), sample_ids))


def _work(llm: LLM, pipe: Connection, job: Job, handoff: Path, store: Path) -> None:
    """Keep the engine full, and have finished requests stored."""
    engine = llm.llm_engine
    # Not the engine's, which may be another (mistral-common's, DeepSeek's): the driver rendered the first turns with this one.
    target = job.engine_arguments
    tokenizer = tokenizer_of(Path(target["model"]), trust_remote_code=target["trust_remote_code"])
    conversations = _Conversations(tokenizer, job.max_model_len)
    inbox: queue.SimpleQueue[list[ExtractRequest] | BaseException | None] = queue.SimpleQueue()
    # Always reading, so that driver and worker never both wait to send.
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    send = _sender(pipe)
    running: dict[str, _Turn] = {}  # by request id
    unsaved: list[_Turn] = []  # answered, states not in a file yet
    expected = job.window
    send(_Room(expected))
    flush_by = 0.0

    def begin(turn: _Turn) -> None:
        running[turn.request_id] = turn
        engine.add_request(turn.request_id, _prompt(turn), _sampling(job, turn))

    with closing(_Storage(job, handoff, store, send, inbox.put)) as storage:
        while True:
            while inbox.qsize() or not (running or unsaved):
                try:
                    given = inbox.get(timeout=_IDLE_SECONDS)
                except queue.Empty:
                    storage.flush()
                    given = inbox.get()
                if given is None:
                    return
                if isinstance(given, BaseException):
                    raise given
                expected -= len(given)
                for request in given:
                    begin(_Turn(request, 0, request.prompt_token_ids, request.conversation))
            if running:
                flush_by = time.monotonic() + _FLUSH_SECONDS
                for output in engine.step():
                    if output.finished and output.request_id in running:
                        turn = running.pop(output.request_id)
                        turn.response = list(output.outputs[0].token_ids) if job.generate else []
                        if turn.request.images:
                            turn.prompt_token_ids = list(output.prompt_token_ids)
                        unsaved.append(turn)
            else:  # the last requests' states are handed over in the engine's next steps, so keep stepping
                if time.monotonic() > flush_by:
                    raise TimeoutError(
                        f"vLLM has yet to hand over the states of {len(unsaved)} requests, and none came in "
                        f"{_FLUSH_SECONDS} s"
                    )
                engine.step()
                time.sleep(0.002)  # for the writing threads
            for turn in [turn for turn in unsaved if (handoff / turn.file).exists()]:
                unsaved.remove(turn)
                next_turn = conversations.next_turn(turn)
                if next_turn is not None:
                    (handoff / turn.file).unlink()
                    begin(next_turn)
                else:
                    storage.store(turn, conversations.answers_in_prompt(turn))
                flush_by = time.monotonic() + _FLUSH_SECONDS  # many long answers together take longer than that
            room = job.window - len(running) - expected
            if room >= max(1, job.window // 8):
                send(_Room(room))
                expected += room


def _sender(pipe: Connection) -> Callable[[Any], None]:
    """Sends to the driver from any thread. If the driver is gone, so is this process soon."""
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    return send


class _Conversations:
    """Conversations whose every turn the target answers."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._turns = TurnRenderer(tokenizer, max_model_len)

    def next_turn(self, turn: _Turn) -> _Turn | None:
        """The turn after an answered one; None if there is none, or if it leaves no room for an answer."""
        if turn.conversation is None:
            return None
        asked = Turn(turn.conversation, turn.prompt_token_ids, turn.request.later[turn.number :], turn.number)
        following = self._turns.next(asked, turn.response, max_tokens=turn.request.max_tokens)
        if following is None:
            return None
        return _Turn(turn.request, following.number, following.token_ids, following.conversation)

    def answers_in_prompt(self, turn: _Turn) -> list[bool]:
        """Loss mask of a turn's prompt: True at earlier answers.

        Found by rendering the whole conversation. If its tokens do not begin with the prompt's (an answer may be tokenized
        differently when it is read back), earlier answers count as context only.
        """
        count = len(turn.prompt_token_ids)
        if turn.number == 0:
            return [False] * count
        assert turn.conversation is not None
        try:
            rendered = self._turns.renderer.text(self._turns.with_answer(turn.conversation, turn.response))
        except Unrenderable:
            return [False] * count
        if rendered.token_ids[:count] != turn.prompt_token_ids:
            return [False] * count
        return rendered.loss_mask[:count]


def _read(pipe: Connection, inbox: queue.SimpleQueue[list[ExtractRequest] | BaseException | None]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
        # The driver is gone or done. A step that is still running has nobody to report to.
        time.sleep(5)
        os._exit(0)


def _prompt(turn: _Turn) -> Any:
    """A turn's prompt for vLLM. Images are decoded as vLLM's server does.

    Raises:
        ValueError: an image has changed, or cannot be read or decoded any more.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": turn.prompt_token_ids}
    if turn.request.images:
        from vllm.multimodal.media import ImageMediaIO

        decoder = ImageMediaIO()
        prompt["multi_modal_data"] = {"image": [decoder.load_bytes(image_bytes(part)) for part in turn.request.images]}
    return prompt


def _sampling(job: Job, turn: _Turn) -> Any:
    from vllm import SamplingParams

    from draftsmith.extract.connector import FORM_KEY, NAME_KEY, PROMPT_ONLY_KEY

    handing_over = {NAME_KEY: turn.request_id, PROMPT_ONLY_KEY: not job.generate, FORM_KEY: job.compression}
    return SamplingParams(
        **job.sampling,
        max_tokens=turn.request.max_tokens,
        seed=turn.request.sampling_seed(job.seed) + turn.number,
        extra_args={"kv_transfer_params": handing_over},
    )
