"""How long a step of vLLM spends on its next draft, the rest being the target's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DraftClock:
    """The time of every draft that an engine in this process makes while `running`.

    A draft is one call of the drafter for all sequences of a step, of however many forward passes, with its sampling and what prepares its
    inputs. On a GPU, where kernels run behind the program, it is timed between two events on the stream.

    Args:
        llm: `vllm.LLM`, with either model runner.
    """

    def __init__(self, llm: Any) -> None:
        # An engine on several devices has its workers in other processes, out of reach.
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
        self._runner: Any = getattr(worker, "model_runner", None)
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the drafts meanwhile, and forget those of before."""
        self._marks = []
        owner, name = self._drafter()
        if owner is None:
            yield
            return
        propose = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self._mark()
            drafts = propose(*args, **kwargs)
            self._marks.append((before, self._mark()))
            return drafts

        setattr(owner, name, timed)
        try:
            yield
        finally:
            delattr(owner, name)  # the class's own is behind it

    def seconds(self) -> list[float]:
        """Of each draft since `running` began, in order; none without a drafter, or if it is out of reach."""
        if self._marks and not isinstance(self._marks[0][0], float):
            self._marks[-1][1].synchronize()
            return [before.elapsed_time(after) / 1000 for before, after in self._marks]
        return [after - before for before, after in self._marks]

    def _drafter(self) -> tuple[Any, str]:
        """What proposes, and its method: of vLLM's second model runner the speculator, of its first the runner itself."""
        if getattr(self._runner, "speculator", None) is not None:
            return self._runner.speculator, "propose"
        if getattr(self._runner, "drafter", None) is not None:
            return self._runner, "propose_draft_token_ids"
        return None, ""

    def _mark(self) -> Any:
        if self._runner.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._runner.device, enable_timing=True)
        event.record()
        return event
