"""One token a step while extracting on a CPU.

vLLM's `extract_hidden_states` hands the sampled token back as a draft of itself, so that its drafting machinery runs.
Verified in the next step, that draft would add a second row to every sequence's decode step and next to nothing to
its output, and on a CPU rows cost. This scheduler lets the drafts go. On GPUs vLLM's own does, by a schedule of no drafts, which
its model runner for CPUs refuses.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

logger = init_logger(__name__)


class ExtractionScheduler(Scheduler):
    """vLLM's scheduler without drafts. Needs `async_scheduling=False`: there drafts never pass through here."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        pass

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        # Correct, and slow: what was computed of the sequence is thrown away. vLLM itself only counts it.
        logger.warning_once(
            "The KV cache is full: sequences are preempted and computed again. Raise engine.kv_cache_gib (CPU) or "
            "engine.gpu_memory_utilization, or lower extract.max_num_seqs."
        )
        return super()._preempt_request(*args, **kwargs)
