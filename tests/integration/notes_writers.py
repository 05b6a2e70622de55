"""An extraction's engine that also notes which of its processes write handoff files, in `writers.json` beside the store."""

import json
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from draftsmith.extract import worker
from draftsmith.extract.job import Job


def _writes(one: Any) -> bool:
    """In a process of the engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._writer is not None


run_job = worker._child


def child(pipe: Connection, job: Job, handoff: Path, store: Path) -> None:
    import vllm

    def noted(**arguments: Any) -> vllm.LLM:
        llm = made(**arguments)
        (store.parent / "writers.json").write_text(json.dumps(llm.collective_rpc(_writes)))
        return llm

    made = vllm.LLM
    with mock.patch.object(vllm, "LLM", noted):
        run_job(pipe, job, handoff, store)
