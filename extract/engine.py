"""The engine that extracts, in a child process: requests in, answers with their spool files out.

A child, because its environment (OpenMP) has to be there as the process starts, and because an engine that dies must
not take the driver with it. Inside the child the engine runs in-process: vLLM's own engine processes would keep one
CPU core of two for scheduling.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import recipe, vllm_env
from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

_FLUSH_SECONDS = 60.0
_LOG_LINES = 15


@dataclass(frozen=True)
class Ask:
    """One prompt for the engine. Driver to child."""

    name: str
    prompt_token_ids: list[int]
    max_tokens: int
    seed: int
    """Its own, so that order and batch do not matter to sampling."""


@dataclass(frozen=True)
class Answer:
    """A finished request whose states are on disk. Child to driver."""

    name: str
    response_token_ids: list[int]
    spool_file: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the child needs. Driver to child, once."""

    engine_arguments: dict[str, Any]
    """Keyword arguments of `vllm.LLM`."""
    asks: list[Ask]
    generate: bool
    """Answer the prompts, or only prefill them."""
    temperature: float
    window: int
    """Requests in the engine at once, waiting ones included."""
    spool: Path


def run_engine(job: Job, engine: recipe.Engine, log: Path) -> Iterator[Answer]:
    """Run a job in a child process and yield each answer as it finishes.

    Raises:
        DraftsmithError: the engine failed; with the end of its log.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    log.write_text("")
    process = context.Process(target=_child, args=(theirs, job, str(log)), name="extraction-engine")
    with vllm_env.environment(vllm_env.vllm_environment(engine)):
        process.start()
    theirs.close()
    try:
        while True:
            try:
                message = ours.recv()
            except (EOFError, OSError):
                process.join()
                message = f"its process ended with status {process.exitcode}"
            if message is None:
                return
            if isinstance(message, str):
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
                raise DraftsmithError(
                    f"The vLLM engine failed: {message}. What was extracted so far is kept; run the stage again to "
                    f"continue. Its log is {log}; the last lines are:\n{tail}"
                )
            yield message
    finally:
        ours.close()  # a child that is still working reads the end of the pipe and leaves
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


# --- the child's side ---


def _child(pipe: Connection, job: Job, log: str) -> None:
    vllm_env.end_with_parent()
    vllm_env.print_into(log)
    try:
        from vllm import LLM

        for answer in _answers(LLM(**job.engine_arguments), job):
            pipe.send(answer)
        pipe.send(None)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        with suppress(OSError):
            pipe.send(f"{type(error).__name__}: {str(error).strip()[:500]}")


def _answers(llm: LLM, job: Job) -> Iterator[Answer]:
    """Keep the engine full; yield each request when it is finished and its states are on disk."""
    engine = llm.llm_engine
    waiting = iter(job.asks)
    unsaved: list[RequestOutput] = []

    def saved() -> Iterator[Answer]:
        for output in list(unsaved):
            file = _spool_file(output)
            if (job.spool / file).exists():
                unsaved.remove(output)
                yield Answer(output.request_id, list(output.outputs[0].token_ids), file)

    while True:
        for ask in islice(waiting, job.window - engine.get_num_unfinished_requests()):
            engine.add_request(ask.name, {"prompt_token_ids": ask.prompt_token_ids}, _sampling(job, ask))
        if not engine.has_unfinished_requests():
            break
        unsaved += [output for output in engine.step() if output.finished]
        yield from saved()

    # The engine is idle. The last requests' states are handed over in its next step, so give it one.
    deadline = time.monotonic() + _FLUSH_SECONDS
    while unsaved:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"vLLM did not hand over the states of {len(unsaved)} requests in {_FLUSH_SECONDS:.0f} s"
            )
        _step_once(llm)
        yield from saved()


def _sampling(job: Job, ask: Ask) -> Any:
    from vllm import SamplingParams

    from draftsmith.extract.connector import PROMPT_ONLY_KEY

    return SamplingParams(
        temperature=job.temperature,
        max_tokens=ask.max_tokens,
        seed=ask.seed,
        detokenize=False,
        extra_args={"kv_transfer_params": {PROMPT_ONLY_KEY: not job.generate}},
    )


def _spool_file(output: RequestOutput) -> str:
    from draftsmith.extract.connector import SPOOL_KEY

    file = (output.kv_transfer_params or {}).get(SPOOL_KEY)
    if file is None:
        raise RuntimeError(f"vLLM finished request {output.request_id} without saving its hidden states")
    return str(file)


def _step_once(llm: LLM) -> None:
    from vllm import SamplingParams

    from draftsmith.extract.connector import DISCARD_KEY

    params = SamplingParams(max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": {DISCARD_KEY: True}})
    llm.generate([{"prompt_token_ids": [0]}], params, use_tqdm=False)
    time.sleep(0.02)
