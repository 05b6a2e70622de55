"""An engine of an evaluation that also tells every chain of tokens that its drafter proposed, with its context."""

import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from draftsmith.serve.evaluation import engine_child


class NotesProposals(engine_child._Engine):
    def __init__(self, arguments: dict[str, Any]) -> None:
        # Otherwise proposals stay in the worker.
        super().__init__(arguments | {"async_scheduling": False})
        scheduler = self._scheduler()
        update, self._proposals = scheduler.update_draft_token_ids, []

        def note(drafts: Any) -> None:
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
                request = scheduler.requests.get(name)
                if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                    self._proposals.append((tuple(request.all_token_ids), tuple(tokens)))
            update(drafts)

        scheduler.update_draft_token_ids = note

    def proposals(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Contexts and proposals since the last call."""
        found, self._proposals[:] = list(self._proposals), []
        return found


def child(pipe: Connection, arguments: dict[str, Any]) -> None:
    from vllm.model_executor.models import registry

    # On a CPU an engine that has never seen a model's class needs no other process to look at it (the plugin).
    with (
        tempfile.TemporaryDirectory() as unseen,
        mock.patch.dict(os.environ, VLLM_CACHE_ROOT=unseen),
        mock.patch.object(registry, "subprocess", None),
        mock.patch.object(engine_child, "_Engine", NotesProposals),
    ):
        engine_child.child(pipe, arguments)
