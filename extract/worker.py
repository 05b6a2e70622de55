"""Engines that extract, in child processes: prompts in, handoff files with their states out.

Children, because an engine's environment (OpenMP, its cores or GPUs) has to be there as the process starts, and because
an engine that dies must not take the driver with it. Inside a child the engine runs in-process: vLLM's own engine
processes would keep one CPU core of two for scheduling.

The driver hands prompts out as workers ask for more, so a data set is never in memory whole, a fast worker gets more,
and what a dead worker had goes to the others. Back-pressure: a worker whose states the driver has not taken yet stops
stepping.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.config import recipe
from draftsmith.data.chat_template import Unrenderable
from draftsmith.data.conversations import Conversation
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.engine import environment
from draftsmith.extract.handoff import spool_file, take_spool_file
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.process import disable_malloc_trim
from draftsmith.run.progress import console
from draftsmith.store.codec import EncodedStates, Form

if TYPE_CHECKING:
    from vllm import LLM

_FLUSH_SECONDS = 60.0
"""Without a file: so long the last requests' states may take to come."""
_LOG_LINES = 15
_ASK_AGAIN_SECONDS = 1.0
"""Between two looks for new prompts where there were none, though no engine says anything."""
_UNTAKEN = 64
"""Finished requests whose states may lie in a worker's handoff before it waits for the driver."""


@dataclass(frozen=True)
class EngineRequest:
    """One prompt for an engine. Driver to worker."""

    name: str
    """Names the request and its handoff file; unique in a run."""
    prompt_token_ids: list[int]
    max_tokens: int
    seed: int
    """Its own, so that order and batch do not matter to sampling."""
    compression: Form
    """What its states come back in. They are encoded beside the engine that makes them, so that many engines share the work."""
    conversation: Conversation | None = None
    """With `later`: the messages that `prompt_token_ids` render."""
    later: tuple[list[dict[str, Any]], ...] = ()
    """What is added after each answer, to be answered in turn (`Conversation.user_turns`)."""


@dataclass(frozen=True)
class Extracted:
    """A finished request with its states."""

    name: str
    prompt_token_ids: list[int]
    """As asked; with later turns, those of the last one answered, earlier answers included."""
    prompt_loss_mask: list[bool]
    """True at earlier answers in the prompt."""
    response_token_ids: list[int]
    """Empty when only the prompt was asked for."""
    saved_token_ids: torch.Tensor
    """int32 [M]: the tokens that the states are of, as the engine saved them."""
    states: EncodedStates
    """[M, L, H]"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for every prompt. Driver to worker, once."""

    engine_arguments: dict[str, Any]
    """Keyword arguments of `vllm.LLM`, without the connector's."""
    generate: bool
    """Answer the prompts, or only prefill them."""
    sampling: dict[str, Any]
    """Keyword arguments of `vllm.SamplingParams` that all prompts share."""
    window: int
    """Requests in an engine at once, waiting ones included."""
    max_model_len: int
    """Longest sequence: a turn that would not fit ends its conversation."""


def run_engines(
    job: Job,
    asks: Iterable[EngineRequest | None],
    engine: recipe.EngineConfig,
    *,
    workers: int,
    directory: Path,
    handoff: Path,
) -> Iterator[Extracted]:
    """Run a job on several engines of this machine and yield each request as it finishes, in no order.

    Args:
        asks: read as engines have room. None: there are none just now. Not to be given while nothing is under way: then
            the iterator waits for the next, or ends.
        workers: engines; a CPU's cores and a machine's GPUs are divided among them.
        directory: for logs.
        handoff: an empty folder for handoff files.

    Raises:
        DraftsmithError: every engine failed; with the end of the last one's log.
    """
    pending = iter(asks)
    returned: deque[EngineRequest] = deque()  # of workers that died
    workers = [_Worker(number, job, engine, workers, directory, handoff / str(number)) for number in range(workers)]

    def hand_out(worker: _Worker) -> None:
        batch: list[EngineRequest] = []
        while len(batch) < worker.wants:
            ask = returned.popleft() if returned else next(pending, None)
            if ask is None:
                break
            batch.append(ask)
        worker.give(batch)

    try:
        while workers:
            for pipe in wait([worker.pipe for worker in workers], timeout=_ASK_AGAIN_SECONDS):
                (worker,) = (one for one in workers if one.pipe is pipe)
                message = worker.receive()
                if isinstance(message, int):
                    worker.wants += message
                elif isinstance(message, Extracted):
                    del worker.outstanding[message.name]
                    yield message
                else:
                    workers.remove(worker)
                    worker.close()
                    if not workers:
                        raise DraftsmithError(worker.failure_message(message))
                    returned.extend(worker.outstanding.values())
                    console.print(
                        f"extract: {worker.failure_message(message)} The other engines take over.", style="yellow"
                    )
            for worker in workers:
                hand_out(worker)
            if all(worker.wants and not worker.outstanding for worker in workers):
                return  # everybody wanted more and there was none
    finally:
        for worker in workers:
            worker.close()


@dataclass
class _Worker:
    """The driver's side of one engine."""

    number: int
    job: Job
    engine: recipe.EngineConfig
    workers: int
    directory: Path
    handoff: Path
    wants: int = 0
    outstanding: dict[str, EngineRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = self.directory / (f"engine-{self.number}.log" if self.workers > 1 else "engine.log")
        self.log.write_text("")
        self.handoff.mkdir()
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = environment.start_engine_process(
            _child,
            (theirs, self.job, self.handoff, str(self.log)),
            name=f"extraction-engine-{self.number}",
            engine=self.engine,
            share=environment.share_of_machine(self.number, self.workers, self.engine.tensor_parallel_size),
        )
        theirs.close()

    def give(self, asks: list[EngineRequest]) -> None:
        if not asks:
            return
        self.outstanding |= {ask.name: ask for ask in asks}
        self.wants -= len(asks)
        with suppress(OSError):  # it died: the next receive says so
            self.pipe.send(asks)

    def receive(self) -> int | Extracted | str:
        """How many more prompts it has room for, a finished request, or why it failed."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with status {self.process.exitcode}"
        if isinstance(message, tuple):
            name, file, prompt, mask, response = message
            saved, states = take_spool_file(self.handoff / file)
            prompt = self.outstanding[name].prompt_token_ids if prompt is None else prompt
            mask = [False] * len(prompt) if mask is None else mask
            return Extracted(name, prompt, mask, response, saved, states)
        assert isinstance(message, int | str)
        return message

    def failure_message(self, reason: str) -> str:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        return (
            f"The vLLM engine failed: {reason}. What was extracted so far is kept; run the stage again to continue. "
            f"Its log is {self.log}; the last lines are:\n{tail}\n"
        )

    def close(self) -> None:
        self.pipe.close()  # a child that is still working reads the end of the pipe and leaves
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        shutil.rmtree(self.handoff, ignore_errors=True)


# --- the child's side ---


def _child(pipe: Connection, job: Job, handoff: Path, log: str) -> None:
    environment.end_with_parent()
    environment.print_into(log)
    disable_malloc_trim()  # what encoding a sequence frees, encoding the next one needs
    try:
        from vllm import LLM

        connector = {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "draftsmith.extract.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"spool_directory": str(handoff.resolve()), "names_from_requests": True},
        }
        _work(LLM(**job.engine_arguments, kv_transfer_config=connector), pipe, job, handoff)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        with suppress(OSError):
            pipe.send(f"{type(error).__name__}: {str(error).strip()[:500]}")


@dataclass
class _Turn:
    """A request in the engine: one user turn of an ask."""

    ask: EngineRequest
    number: int
    prompt_token_ids: list[int]
    conversation: Conversation | None
    response: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return f"{self.ask.name}-{self.number}"

    @property
    def file(self) -> str:
        return spool_file(self.request_id)


def _work(llm: LLM, pipe: Connection, job: Job, handoff: Path) -> None:
    """Keep the engine full; tell the driver of each ask that is finished and whose states are on disk."""
    engine = llm.llm_engine
    conversations = _Conversations(llm.get_tokenizer(), job.max_model_len)
    inbox: queue.SimpleQueue[list[EngineRequest] | None] = queue.SimpleQueue()
    # Always reading, so that the driver never waits to send while we wait to send.
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    running: dict[str, _Turn] = {}  # by request id
    unsaved: list[_Turn] = []  # answered, states not on disk yet
    untaken: deque[Path] = deque()  # on disk, not taken by the driver yet
    expected = job.window
    pipe.send(expected)
    flush_by = 0.0

    def begin(turn: _Turn) -> None:
        running[turn.request_id] = turn
        engine.add_request(turn.request_id, {"prompt_token_ids": turn.prompt_token_ids}, _sampling(job, turn))

    while True:
        while inbox.qsize() or not (running or unsaved):
            asks = inbox.get()
            if asks is None:
                return
            expected -= len(asks)
            for ask in asks:
                begin(_Turn(ask, 0, ask.prompt_token_ids, ask.conversation))
        while len(untaken) >= _UNTAKEN:
            while untaken and not untaken[0].exists():
                untaken.popleft()
            if len(untaken) >= _UNTAKEN:
                time.sleep(0.002)
                flush_by = time.monotonic() + _FLUSH_SECONDS  # it is the driver that takes its time
        if running:
            flush_by = time.monotonic() + _FLUSH_SECONDS
            for output in engine.step():
                if output.finished and output.request_id in running:
                    turn = running.pop(output.request_id)
                    turn.response = list(output.outputs[0].token_ids) if job.generate else []
                    unsaved.append(turn)
        else:  # the last requests' states are handed over in the engine's next steps, so give it some
            if time.monotonic() > flush_by:
                raise TimeoutError(
                    f"vLLM has still to hand over the states of {len(unsaved)} requests, and none came in {_FLUSH_SECONDS} s"
                )
            engine.step()
            time.sleep(0.002)  # for the writing threads
        for turn in [turn for turn in unsaved if (handoff / turn.file).exists()]:
            unsaved.remove(turn)
            flush_by = time.monotonic() + _FLUSH_SECONDS  # many long answers take longer than that together
            following = conversations.next_turn(turn)
            if following is not None:
                (handoff / turn.file).unlink()
                begin(following)
                continue
            later = turn.number > 0  # what the driver does not know already
            prompt = turn.prompt_token_ids if later else None
            mask = conversations.answers_in_prompt(turn) if later else None
            pipe.send((turn.ask.name, turn.file, prompt, mask, turn.response))
            untaken.append(handoff / turn.file)
        room = job.window - len(running) - expected
        if room >= max(1, job.window // 8):
            pipe.send(room)
            expected += room


class _Conversations:
    """Turns of a conversation that the target answers itself."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._turns = TurnRenderer(tokenizer, max_model_len)

    def next_turn(self, turn: _Turn) -> _Turn | None:
        """The turn after an answered one; None where there is none, or it leaves no room for an answer."""
        if turn.conversation is None:
            return None
        asked = Turn(turn.conversation, turn.prompt_token_ids, turn.ask.later[turn.number :], turn.number)
        following = self._turns.next(asked, turn.response, max_tokens=turn.ask.max_tokens)
        if following is None:
            return None
        return _Turn(turn.ask, following.number, following.token_ids, following.conversation)

    def answers_in_prompt(self, turn: _Turn) -> list[bool]:
        """Loss mask of a later turn's prompt: True at earlier answers.

        Found by rendering the whole conversation. Where its tokens do not begin with the prompt's (an answer may read
        back as other tokens), earlier answers are left as context, rather than guessed.
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


def _read(pipe: Connection, inbox: queue.SimpleQueue[list[EngineRequest] | None]) -> None:
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

    asked = {NAME_KEY: turn.request_id, PROMPT_ONLY_KEY: not job.generate, FORM_KEY: turn.ask.compression}
    return SamplingParams(
        **job.sampling,
        max_tokens=turn.ask.max_tokens,
        seed=turn.ask.seed + turn.number,
        extra_args={"kv_transfer_params": asked},
    )
