"""One token per step while extracting on a CPU.

vLLM's `extract_hidden_states` method returns each sampled token as a draft of itself, so that the drafting machinery runs.
Verifying that draft in the next step would add a second row to every sequence's decode step for no benefit, and on a CPU
rows are what costs. This scheduler drops the drafts. On GPUs vLLM's own scheduler does, given a schedule of zero drafts,
which its model runner for CPUs refuses.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

logger = init_logger(__name__)


class ExtractionScheduler(Scheduler):
    """vLLM's scheduler without drafts. Needs `async_scheduling=False`, since asynchronous drafts do not pass through here."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        pass

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        # Correct but slow: the sequence is computed again from its start. vLLM itself only counts preemptions.
        logger.warning_once(
            "The KV cache is full: sequences are preempted and computed again. Raise engine.kv_cache_gib (CPU) or "
            "engine.gpu_memory_utilization, or lower extract.max_num_seqs."
        )
        return super()._preempt_request(*args, **kwargs)
