"""What `engine.options` may not hold: vLLM's arguments that another key sets, or that no stage could run with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_METHODS = "`serve.method` and `evaluate.methods`"
KEYS = {
    "model": "`target.model`", "tokenizer": "`target.model`", "hf_config_path": "`target.model`",
    "served_model_name": "`serve.vllm_args.served_model_name`",
    "revision": "`target.revision`", "code_revision": "`target.revision`", "tokenizer_revision": "`target.revision`",
    "dtype": "`target.dtype`", "trust_remote_code": "`target.trust_remote_code`", "seed": "`seed`",
    "max_model_len": "`engine.max_model_len`", "enforce_eager": "`engine.enforce_eager`",
    "tensor_parallel_size": "`engine.tensor_parallel_size`", "gpu_memory_utilization": "`engine.gpu_memory_utilization`",
    "kv_cache_memory_bytes": "`engine.kv_cache_gib` and `engine.gpu_memory_utilization`",
    "max_num_seqs": "`extract.max_num_seqs`, `evaluate.acceptance_batch_size` and `serve.vllm_args.max_num_seqs`",
    "max_num_batched_tokens": "`extract.max_num_batched_tokens` and `serve.vllm_args.max_num_batched_tokens`",
    "speculative_config": _METHODS, "spec_method": _METHODS, "spec_model": _METHODS, "spec_tokens": _METHODS,
}  # fmt: skip
"""Arguments and the recipe's keys for them."""
_WHOLE_TEXTS = (
    "extraction reads all of a text's hidden states from one process, and context parallelism divides them; for the server alone, "
    "`serve.vllm_args` takes it"
)
_COPIES = (
    "copies of extraction's engine are `extract.workers`, on several machines `extract.machines`, and `serve.vllm_args` takes it for the "
    "server. A target that needs more GPUs is split with `engine.tensor_parallel_size`"
)
_RAY = (
    "Draftsmith starts one process for an engine; one engine on several machines is `distributed_executor_backend: ray`"
)
_STAGES = (
    "vLLM 0.32 extracts hidden states only from engines without pipeline stages. Split the target with `engine.tensor_parallel_size`, over "
    "several machines with `distributed_executor_backend: ray`; for the server alone, `serve.vllm_args` takes it"
)
_REFUSED = {
    "pipeline_parallel_size": _STAGES,
    "prefill_context_parallel_size": _WHOLE_TEXTS, "decode_context_parallel_size": _WHOLE_TEXTS,
    "nnodes": _RAY, "node_rank": _RAY, "master_addr": _RAY, "master_port": _RAY,
    "skip_tokenizer_init": "texts are read with the engine's tokenizer",
    "hf_token": "a recipe is recorded beside its results; put the token into the environment, as HF_TOKEN",
}  # fmt: skip
"""Arguments that are refused, and why."""
EXECUTOR = "distributed_executor_backend"
EXECUTORS = ("mp", "ray", "uni")
"""Executors that start an engine's processes themselves: on this machine, through Ray, and none beside the engine's own."""
READ_FROM_CONFIG = frozenset({
    "model_type", "num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings", "quantization_config",
    "num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank", "qk_rope_head_dim", "sliding_window", "layer_types",
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon",
    "final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "logits_soft_cap", "output_multiplier",
})  # fmt: skip
"""What Draftsmith reads from the target's config itself, where vLLM's `hf_overrides` do not reach."""
_LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where configs nest their language model's."""


def refusal(options: Mapping[str, Any]) -> str | None:
    """Why `engine.options` cannot hold one of these, with what to do instead; None if nothing speaks against them."""
    for name in options:
        if name in KEYS:
            return f"`{name}` is set by {KEYS[name]}"
        if name.startswith("data_parallel_"):
            return f"`{name}` is refused: {_COPIES}"
        if name in _REFUSED:
            return f"`{name}` is refused: {_REFUSED[name]}"
    if options.get(EXECUTOR, "mp") not in EXECUTORS:
        return f"`{EXECUTOR}` must be one of {', '.join(EXECUTORS)}"
    overrides = options.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        return "`hf_overrides` must be a mapping from fields of the target's config to values"
    for name in _overridden(overrides):
        if name in READ_FROM_CONFIG:
            return f"`hf_overrides` changes `{name}`, which Draftsmith reads from the target's config.json; change it there"
    return None


def _overridden(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Fields that overrides change in a config and in the language model's within it."""
    for name, value in overrides.items():
        yield name
        if name in _LANGUAGE_MODELS and isinstance(value, Mapping):
            yield from _overridden(value)
