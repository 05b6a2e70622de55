"""Run stock vLLM with a drafter and write down every chain it proposes, with the context it proposed it for.

Run as a program: record_proposals.py TARGET DRAFTER METHOD K MAX_TOKENS LONGEST PROMPTS.json OUT.json. PROMPTS is a list of
token id lists, LONGEST the most tokens of a prompt with its answer. `draftsmith` cannot be imported in this process, so what loads here loads for people who do not have it.
"""

import json
import os
import sys


def main() -> None:
    target, drafter, method, k, max_tokens, longest, prompts_path, out = sys.argv[1:]
    with open(prompts_path) as file:
        prompts = json.load(file)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=target, dtype="float32", max_model_len=int(longest), enforce_eager=True, max_num_seqs=32, seed=0,
        enable_prefix_caching=False, disable_log_stats=False, kv_cache_memory_bytes=2 << 30,
        async_scheduling=False,  # otherwise proposals stay in the worker
        speculative_config={"method": method, "model": drafter, "num_speculative_tokens": int(k)},
    )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_draft_token_ids
    proposals = []

    def record(drafts):  # type: ignore[no-untyped-def]
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = scheduler.requests.get(name)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                proposals.append({"request": name, "context": list(request.all_token_ids), "draft": list(tokens)})
        update(drafts)

    scheduler.update_draft_token_ids = record
    params = SamplingParams(temperature=0, max_tokens=int(max_tokens))
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    counters = {
        metric.name: getattr(metric, "value", None) for metric in llm.get_metrics() if "spec_decode" in metric.name
    }
    result = {"outputs": [list(o.outputs[0].token_ids) for o in outputs], "proposals": proposals, "counters": counters}
    with open(out, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    sys.modules["draftsmith"] = None  # type: ignore[assignment]
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "WARNING"}
    main()
