"""What an extraction's engines are asked to do, and what its store is made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from draftsmith.config.recipe import ExtractConfig, Recipe
from draftsmith.engine.environment import is_cpu, memory_arguments, resolved, states_arguments
from draftsmith.store.codec import Form
from draftsmith.store.format import StoreIdentity
from draftsmith.store.writer import most_bytes
from draftsmith.target.family import window_of_all_layers
from draftsmith.target.info import TargetInfo

_MAX_UNSTORED_BYTES = 1 << 30
"""Largest `Job.max_unstored_bytes`: about 50 answers of 650 tokens with the default layers of an 8B target, before compression.
Storing keeps up with an engine except while a disk is slow, and more would not make it faster."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all requests of a run share. Driver to worker, once."""

    engine_arguments: dict[str, Any]
    """Keyword arguments of `vllm.LLM`, without the connector's."""
    generate: bool
    """Answer the prompts, or only prefill them."""
    sampling: dict[str, Any]
    """Keyword arguments of `vllm.SamplingParams`."""
    seed: int
    """The run's; see `ExtractRequest.sampling_seed`."""
    window: int
    """Requests in an engine at once, waiting ones included."""
    max_model_len: int
    """Longest sequence, in tokens: a turn that would not fit ends its conversation."""
    identity: StoreIdentity
    compression: Form
    """How states are encoded. Each engine encodes its own, so that many engines share the work."""
    shard_tokens: int
    """Tokens that fill a shard."""
    max_unstored_bytes: int
    """Bytes of handoff files that wait to be moved into a shard before the engine waits too. A single file may be larger."""


def store_identity(recipe: Recipe, target: TargetInfo, layer_ids: Iterable[int]) -> StoreIdentity:
    """What the recipe's store is made from.

    Args:
        layer_ids: the recipe's, or the default ones.
    """
    options = recipe.extract
    fields = {"mode", "temperature", "top_p", "top_k", "stop", "samples", "turns", "max_tokens", "held_out_max_tokens"}
    sampling = options.model_dump(mode="json", include=fields)
    sampling |= ({"seed": recipe.seed} if options.temperature > 0 else {}) | options.further_sampling()
    if options.mode == "prefill":  # nothing is sampled
        sampling = {"mode": "prefill"}
    return StoreIdentity(
        target=target.name,
        target_revision=target.revision,
        target_config_hash=target.config_hash,
        tokenizer_hash=target.tokenizer_hash,
        chat_template_hash=target.chat_template_hash,
        layer_ids=tuple(layer_ids),
        hidden_size=target.hidden_size,
        dtype=recipe.target.dtype,
        sampling=sampling,
        states="int8" if options.compression == "int8" else "exact",
        engine_options=recipe.engine.options,
    )


def sequences_in_a_step(options: ExtractConfig) -> int:
    """The most sequences that a machine's engines finish in one step of each."""
    return options.max_num_seqs * options.workers


def handoff_bytes(recipe: Recipe, identity: StoreIdentity, *, tokens: int) -> int:
    """The most bytes of a machine's handoff files: those of one step of each engine, and those that wait to be stored.

    Args:
        tokens: of the longest `sequences_in_a_step` sequences together.
    """
    options = recipe.extract
    step = most_bytes(identity, options.compression, tokens=tokens, sequences=sequences_in_a_step(options))
    return step + min(options.workers * _MAX_UNSTORED_BYTES, step)


def max_unstored_bytes(recipe: Recipe, room: int) -> int:
    """`Job.max_unstored_bytes`, where handoff files have `room` bytes on a machine (`handoff_bytes`)."""
    return min(_MAX_UNSTORED_BYTES, room // (2 * recipe.extract.workers))


def engine_job(recipe: Recipe, target: TargetInfo, identity: StoreIdentity, room: int) -> Job:
    """The recipe's job for vLLM's engines.

    Args:
        target: the recipe's.
        identity: of the store.
        room: `handoff_bytes` of the recipe.
    """
    options = recipe.extract
    return Job(
        engine_arguments=engine_arguments(recipe, target, identity.layer_ids),
        generate=options.mode == "generate",
        sampling={
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k or 0,
            "stop": list(options.stop),
            "detokenize": bool(options.stop),
            **options.further_sampling(),
        },
        seed=recipe.seed,
        window=2 * options.max_num_seqs,  # enough to keep the engine full, whatever the size of the data set
        max_model_len=recipe.engine.max_model_len,
        identity=identity,
        compression=options.compression,
        shard_tokens=options.shard_tokens,
        max_unstored_bytes=max_unstored_bytes(recipe, room),
    )


def engine_arguments(recipe: Recipe, target: TargetInfo, layer_ids: Iterable[int]) -> dict[str, Any]:
    """vLLM's `extract_hidden_states` method; the worker adds our connector."""
    options = recipe.extract
    speculative: dict[str, Any] = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    scheduling: dict[str, Any] = {}
    if is_cpu():
        scheduling = {"scheduler_cls": "draftsmith.extract.scheduler.ExtractionScheduler", "async_scheduling": False}
    else:
        # vLLM's own scheduler runs one step ahead of the GPU and is told to drop the drafts. A decoding sequence then has one
        # row in every step, which is what full CUDA graphs are captured for. vLLM caches the states all the same (model
        # runner V2).
        speculative["num_speculative_tokens_per_batch_size"] = [[1, options.max_num_seqs, 0]]
    return recipe.engine.options | {
        "model": str(target.path),
        "trust_remote_code": target.trust_remote_code,
        "dtype": recipe.target.dtype,
        "max_model_len": recipe.engine.max_model_len,
        "enforce_eager": resolved(recipe.engine).enforce_eager,
        "tensor_parallel_size": recipe.engine.tensor_parallel_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": False,  # cached prefixes have no states of their own (reported length mismatches)
        # With a sliding window in every layer, vLLM would make a group of each for the sake of the states' one.
        **({"disable_hybrid_kv_cache_manager": True} if window_of_all_layers(target.config) else {}),
        "kv_sharing_fast_prefill": False,  # leaves layers out at prompt tokens
        "seed": recipe.seed,
        "speculative_config": speculative,
        **scheduling,
        **states_arguments(target.config, recipe.engine.options),
        **memory_arguments(recipe.engine, share=1 / options.workers if is_cpu() else 1.0),
    }
