"""One token a step while extracting.

vLLM's `extract_hidden_states` hands the sampled token back as a draft of itself, so that its drafting machinery runs.
Verified in the next step, that draft would add a second row to every sequence's decode step and next to nothing to
its output, and on a CPU rows cost. This scheduler lets the drafts go.
"""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds


class ExtractionScheduler(Scheduler):
    """vLLM's scheduler without drafts. Needs `async_scheduling=False`: there drafts never pass through here."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        pass
