"""Extraction workers: vLLM engines in child processes that take requests and hand over their states in files.

Child processes, because an engine's environment (OpenMP, its cores or GPUs) has to be set as its process starts, and
because an engine that dies must not take the driver with it. Inside a child the engine runs in-process: vLLM's own engine
process would occupy a CPU core for scheduling.

The driver hands out requests as workers ask for more, so that the data set is never in memory as a whole, a fast worker
gets more, and a dead worker's requests go to the others. Back-pressure: a worker stops stepping while the driver has too
many of its handoff files left to read.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.config import recipe
from draftsmith.data.chat_template import Unrenderable
from draftsmith.data.conversations import Conversation
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.engine.environment import share_of_machine
from draftsmith.engine.process import EngineFailed, EngineProcess
from draftsmith.extract.handoff import handoff_file, take_handoff_file
from draftsmith.extract.requests import ExtractRequest
from draftsmith.run.process import disable_malloc_trim
from draftsmith.run.progress import console
from draftsmith.store.codec import EncodedStates, Form

if TYPE_CHECKING:
    from vllm import LLM

_FLUSH_SECONDS = 60.0
"""How long the last requests' states may take to arrive, with no other file arriving meanwhile."""
_POLL_SECONDS = 1.0
"""Time between two looks for new requests after there were none, even if no worker reports anything."""
_MAX_UNTAKEN = 64
"""Handoff files that a worker leaves for the driver before it stops stepping."""


@dataclass(frozen=True)
class Extracted:
    """A finished request with its states."""

    request: ExtractRequest
    prompt_token_ids: list[int]
    """The request's; with later turns, the prompt of the last turn answered, earlier answers included."""
    prompt_loss_mask: list[bool]
    """True at earlier answers in the prompt."""
    response_token_ids: list[int]
    """Empty where the prompt was only prefilled."""
    saved_token_ids: torch.Tensor
    """int32 [M]: the tokens that the states belong to, as the engine saved them."""
    states: EncodedStates
    """[M, L, H]"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all requests of a run share. Driver to worker, once."""

    engine_arguments: dict[str, Any]
    """Keyword arguments of `vllm.LLM`, without the connector's."""
    generate: bool
    """Answer the prompts, or only prefill them."""
    sampling: dict[str, Any]
    """Keyword arguments of `vllm.SamplingParams`."""
    seed: int
    """The run's; see `ExtractRequest.sampling_seed`."""
    compression: Form
    """How states are encoded. Each engine encodes its own, so that many engines share the work."""
    window: int
    """Requests in an engine at once, waiting ones included."""
    max_model_len: int
    """Longest sequence, in tokens: a turn that would not fit ends its conversation."""


def run_engines(
    job: Job,
    requests: Iterable[ExtractRequest | None],
    engine: recipe.EngineConfig,
    *,
    num_workers: int,
    directory: Path,
    handoff: Path,
) -> Iterator[Extracted]:
    """Run a job on several engines of this machine and yield each request as it finishes, in no particular order.

    Args:
        requests: read as engines have room. None means that there are none at the moment; it must not come while no request
            is in flight: the iterator then has to wait for the next request, or end.
        num_workers: engines. A CPU's cores and a machine's GPUs are divided among them.
        directory: for logs.
        handoff: an empty folder for handoff files.

    Raises:
        EngineFailed: every engine failed; with the end of the last one's log.
    """
    pending = iter(requests)
    returned: deque[ExtractRequest] = deque()  # of workers that died
    workers = [
        _Worker(number, num_workers, job, engine, directory, handoff / str(number)) for number in range(num_workers)
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
                    extracted = worker.receive()
                except EngineFailed as error:
                    workers.remove(worker)
                    worker.close()
                    if not workers:
                        raise
                    returned.extend(worker.in_flight.values())
                    console.print(f"extract: {error}\nThe other engines take over.", style="yellow", markup=False)
                    continue
                if extracted is not None:
                    yield extracted
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
        self, number: int, num_workers: int, job: Job, engine: recipe.EngineConfig, directory: Path, handoff: Path
    ) -> None:
        self.room = 0
        """Requests that it could take now."""
        self.in_flight: dict[int, ExtractRequest] = {}
        """By sample id."""
        self._handoff = handoff
        handoff.mkdir()
        self.process = EngineProcess(
            _child,
            (job, handoff),
            name=f"extraction-{number}",
            engine=engine,
            log=directory / (f"engine-{number}.log" if num_workers > 1 else "engine.log"),
            variables=share_of_machine(number, num_workers, engine.tensor_parallel_size),
            advice="What was extracted so far is kept; run the stage again to continue.",
        )

    def give(self, requests: list[ExtractRequest]) -> None:
        if requests:
            self.in_flight |= {request.sample_id: request for request in requests}
            self.room -= len(requests)
            self.process.send(requests)

    def receive(self) -> Extracted | None:
        """Wait for the worker's next message: a finished request, or None where it has room for more.

        Raises:
            EngineFailed: the worker reported an error or ended.
        """
        message = self.process.receive()
        if isinstance(message, int):
            self.room += message
            return None
        sample_id, file, prompt, mask, response = message
        request = self.in_flight.pop(sample_id)
        saved, states = take_handoff_file(self._handoff / file)
        prompt = request.prompt_token_ids if prompt is None else prompt
        mask = [False] * len(prompt) if mask is None else mask
        return Extracted(request, prompt, mask, response, saved, states)

    def close(self) -> None:
        self.process.close()
        shutil.rmtree(self._handoff, ignore_errors=True)


# --- the child's side ---


def _child(pipe: Connection, job: Job, handoff: Path) -> None:
    disable_malloc_trim()  # what encoding a sequence frees, encoding the next one needs
    from vllm import LLM

    connector = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "draftsmith.extract.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"handoff_directory": str(handoff.resolve()), "names_from_requests": True},
    }
    _work(LLM(**job.engine_arguments, kv_transfer_config=connector), pipe, job, handoff)


@dataclass
class _Turn:
    """A user turn of a request, as the engine runs it."""

    request: ExtractRequest
    number: int
    prompt_token_ids: list[int]
    conversation: Conversation | None
    response: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """vLLM's name for it."""
        return f"{self.request.sample_id}-{self.number}"

    @property
    def file(self) -> str:
        return handoff_file(self.request_id)


def _work(llm: LLM, pipe: Connection, job: Job, handoff: Path) -> None:
    """Keep the engine full; tell the driver about each finished request whose states are in a handoff file."""
    engine = llm.llm_engine
    conversations = _Conversations(llm.get_tokenizer(), job.max_model_len)
    inbox: queue.SimpleQueue[list[ExtractRequest] | None] = queue.SimpleQueue()
    # Always reading, so that driver and worker never both wait to send.
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    running: dict[str, _Turn] = {}  # by request id
    unsaved: list[_Turn] = []  # answered, states not in a file yet
    untaken: deque[Path] = deque()  # files that the driver has not taken yet
    expected = job.window
    pipe.send(expected)
    flush_by = 0.0

    def begin(turn: _Turn) -> None:
        running[turn.request_id] = turn
        engine.add_request(turn.request_id, {"prompt_token_ids": turn.prompt_token_ids}, _sampling(job, turn))

    while True:
        while inbox.qsize() or not (running or unsaved):
            requests = inbox.get()
            if requests is None:
                return
            expected -= len(requests)
            for request in requests:
                begin(_Turn(request, 0, request.prompt_token_ids, request.conversation))
        while len(untaken) >= _MAX_UNTAKEN:
            while untaken and not untaken[0].exists():
                untaken.popleft()
            if len(untaken) >= _MAX_UNTAKEN:
                time.sleep(0.002)
                flush_by = time.monotonic() + _FLUSH_SECONDS  # the delay is the driver's
        if running:
            flush_by = time.monotonic() + _FLUSH_SECONDS
            for output in engine.step():
                if output.finished and output.request_id in running:
                    turn = running.pop(output.request_id)
                    turn.response = list(output.outputs[0].token_ids) if job.generate else []
                    unsaved.append(turn)
        else:  # the last requests' states are handed over in the engine's next steps, so keep stepping
            if time.monotonic() > flush_by:
                raise TimeoutError(
                    f"vLLM has yet to hand over the states of {len(unsaved)} requests, and none came in {_FLUSH_SECONDS} s"
                )
            engine.step()
            time.sleep(0.002)  # for the writing threads
        for turn in [turn for turn in unsaved if (handoff / turn.file).exists()]:
            unsaved.remove(turn)
            flush_by = time.monotonic() + _FLUSH_SECONDS  # many long answers together take longer than that
            next_turn = conversations.next_turn(turn)
            if next_turn is not None:
                (handoff / turn.file).unlink()
                begin(next_turn)
                continue
            is_later = turn.number > 0  # the driver knows the first turn's prompt
            prompt = turn.prompt_token_ids if is_later else None
            mask = conversations.answers_in_prompt(turn) if is_later else None
            pipe.send((turn.request.sample_id, turn.file, prompt, mask, turn.response))
            untaken.append(handoff / turn.file)
        room = job.window - len(running) - expected
        if room >= max(1, job.window // 8):
            pipe.send(room)
            expected += room


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
        """Loss mask of a later turn's prompt: True at earlier answers.

        Found by rendering the whole conversation. If its tokens do not begin with the prompt's (an answer may be tokenized
        differently when it is read back), earlier answers count as context only.
        """
        assert turn.conversation is not None
        count = len(turn.prompt_token_ids)
        try:
            rendered = self._turns.renderer.text(self._turns.with_answer(turn.conversation, turn.response))
        except Unrenderable:
            return [False] * count
        if rendered.token_ids[:count] != turn.prompt_token_ids:
            return [False] * count
        return rendered.loss_mask[:count]


def _read(pipe: Connection, inbox: queue.SimpleQueue[list[ExtractRequest] | None]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
        # The driver is gone or done. A step that is still running has nobody to report to.
        time.sleep(5)
        os._exit(0)


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
