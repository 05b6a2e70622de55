"""The engine of `draftsmith generate`, in its child process: takes prompts at any time and hands back each answer as it ends."""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from draftsmith.serve.evaluation.engine_child import counters_of


class Asked(NamedTuple):
    """A prompt. Parent to child."""

    name: str
    """Unique among all that are asked."""
    token_ids: list[int]
    max_tokens: int
    seed: int | None
    """None where decoding is greedy."""


class Answered(NamedTuple):
    """Its answer. Child to parent."""

    name: str
    token_ids: list[int]
    text: str
    finish_reason: str | None
    """`stop` or `length`."""
    logprobs: list[list[tuple[int, float]]] | None
    """For each token: token ids and log probabilities, its own first; None unless asked for."""


def child(pipe: Connection, arguments: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Load the model, report that it is loaded, then answer lists of `Asked`. None ends it: it then sends vLLM's counters.

    Args:
        arguments: of `vllm.LLM`.
        sampling: of `vllm.SamplingParams`, without those in `Asked`.
    """
    from vllm import LLM

    llm = LLM(**arguments)
    engine = llm.llm_engine
    inbox: queue.SimpleQueue[list[Asked] | None] = queue.SimpleQueue()
    # Always reading, so that the two sides never both wait to send.
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    pipe.send(None)
    running = 0
    while True:
        while inbox.qsize() or not running:
            given = inbox.get()
            if given is None:
                pipe.send(counters_of(llm))
                return
            for one in given:
                engine.add_request(one.name, {"prompt_token_ids": one.token_ids}, _parameters(sampling, one))
            running += len(given)
        for output in engine.step():
            if output.finished:
                running -= 1
                pipe.send(_answered(output))


def _read(pipe: Connection, inbox: queue.SimpleQueue[list[Asked] | None]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)  # the parent is gone


def _parameters(sampling: dict[str, Any], one: Asked) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

    objects = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
    made = {name: objects[name](**value) if name in objects else value for name, value in sampling.items()}
    return SamplingParams(**made, max_tokens=one.max_tokens, seed=one.seed, output_kind=RequestOutputKind.FINAL_ONLY)


def _answered(output: Any) -> Answered:
    (answer,) = output.outputs
    logprobs = None
    if answer.logprobs is not None:
        logprobs = [
            sorted(((token, said.logprob) for token, said in at.items()), key=lambda one: one[0] != own)
            for own, at in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
    return Answered(output.request_id, list(answer.token_ids), answer.text, answer.finish_reason, logprobs)
