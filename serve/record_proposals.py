"""Run stock vLLM with drafters, one after another, and record every chain that it proposes, with its context.

Run as a program: record_proposals.py JOB.json OUT.json. JOB has `target`, `dtype`, `drafters` (of each, vLLM's `speculative_config` without K), `k`,
`max_tokens`, `longest` (tokens of the longest prompt with its answer), `prompts` (lists of token ids), `arguments` (further ones of
`vllm.LLM`), `trust_remote_code`, `parent` (the id of the process to end with) and `stock`: if true, `draftsmith` cannot be imported in this process, so
a drafter that loads here loads where Draftsmith is not installed. This process must lead its process group, which ends as a whole.

Importing vLLM takes longer than starting an engine: it is imported once, and each drafter runs in a fork of the process.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any


def main() -> None:
    job_path, out = sys.argv[1:]
    with open(job_path) as file:
        job = json.load(file)
    threading.Thread(target=end_with, args=(job["parent"],), daemon=True).start()
    plugins = os.environ.get("VLLM_PLUGINS", "draftsmith")  # those of another platform included
    if job["stock"]:
        sys.modules["draftsmith"] = None  # type: ignore[assignment]
        plugins = ",".join(name for name in plugins.split(",") if name != "draftsmith")
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": plugins,
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    import vllm  # noqa: F401 (for the forks)

    for number, drafter in enumerate(job["drafters"]):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with open(f"{out}.{number}", "w") as file:
                    json.dump(record(job, drafter), file)
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        if ended != 0:
            sys.exit(1)
    found = []
    for number in range(len(job["drafters"])):
        with open(f"{out}.{number}") as file:
            found.append(json.load(file))
    with open(out, "w") as file:
        json.dump(found, file)


def end_with(parent: int) -> None:
    """End this process's group, and so the fork, once `parent` has ended; as `server_process` does, which is part of `draftsmith`."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def record(job: dict[str, Any], drafter: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=job["longest"],
        enforce_eager=True,
        max_num_seqs=32,
        seed=0,
        enable_prefix_caching=False,
        disable_log_stats=False,
        kv_cache_memory_bytes=1 << 30,
        # vLLM starts only where this share of a GPU is free, although it goes by the cache's size: a server may be running there.
        gpu_memory_utilization=0.05,
        async_scheduling=False,  # otherwise proposals stay in the worker
        trust_remote_code=job["trust_remote_code"],
        speculative_config={**drafter, "num_speculative_tokens": job["k"]},
        **job["arguments"],
    )
    core: Any = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    update = scheduler.update_draft_token_ids
    # Model runner V2, used on GPUs, tells the scheduler only how many tokens it proposed.
    kept: Any = None
    if llm.llm_engine.vllm_config.use_v2_model_runner:
        kept = core.model_executor.driver_worker.worker.model_runner.req_states
    proposals = []

    def note(drafts: Any) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = scheduler.requests.get(name)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                if kept is not None:
                    tokens = kept.draft_tokens[kept.req_id_to_index[name], : len(tokens)].tolist()
                proposals.append({"request": name, "context": list(request.all_token_ids), "draft": list(tokens)})
        update(drafts)

    scheduler.update_draft_token_ids = note
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    counters = {
        metric.name: getattr(metric, "value", None) for metric in llm.get_metrics() if "spec_decode" in metric.name
    }
    return {"proposals": proposals, "counters": counters}


if __name__ == "__main__":
    main()
