"""One machine's part of an extraction: requests in, checked sequences out, by vLLM engines or by transformers."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from draftsmith.config.recipe import ExtractConfig, Recipe
from draftsmith.engine.environment import is_cpu, memory_arguments, resolved
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.worker import Extracted, Job, run_engines
from draftsmith.run.errors import DraftsmithError
from draftsmith.store.format import EncodedSequence, StoreIdentity
from draftsmith.target.info import TargetInfo


def store_identity(recipe: Recipe, target: TargetInfo, layer_ids: Iterable[int]) -> StoreIdentity:
    """What the recipe's store is made from.

    Args:
        layer_ids: the recipe's, or the default ones.
    """
    options = recipe.extract
    fields = {"mode", "temperature", "top_p", "top_k", "stop", "samples", "turns", "max_tokens", "held_out_max_tokens"}
    sampling = options.model_dump(mode="json", include=fields)
    return StoreIdentity(
        target=target.name,
        target_revision=target.revision,
        target_config_hash=target.config_hash,
        tokenizer_hash=target.tokenizer_hash,
        chat_template_hash=target.chat_template_hash,
        layer_ids=tuple(layer_ids),
        hidden_size=target.hidden_size,
        dtype=recipe.target.dtype,
        sampling=sampling | ({"seed": recipe.seed} if options.temperature > 0 else {}),
        states="int8" if options.compression == "int8" else "exact",
    )


def max_handoff_sequences(options: ExtractConfig) -> int:
    """The most sequences whose states lie in one machine's handoff folder at once (`Job.window` for each engine)."""
    return 2 * options.max_num_seqs * options.workers


def extracted_sequences(
    recipe: Recipe,
    target: TargetInfo,
    identity: StoreIdentity,
    requests: Iterable[ExtractRequest | None],
    directory: Path,
    handoff: Path,
) -> Generator[EncodedSequence, None, None]:
    """Run every request on this machine; yield its checked sequence as it finishes, in no particular order.

    Args:
        requests: read as engines have room; None as in `run_engines`.
        directory: for logs.
        handoff: an empty folder for handoff files.

    Raises:
        DraftsmithError: every engine failed, or one returned other states than were asked for.
    """
    for extracted in _extracted(recipe, target, identity.layer_ids, requests, directory, handoff):
        yield _checked(extracted)


def _extracted(
    recipe: Recipe,
    target: TargetInfo,
    layer_ids: tuple[int, ...],
    requests: Iterable[ExtractRequest | None],
    directory: Path,
    handoff: Path,
) -> Iterator[Extracted]:
    """Every request with its states, from the recipe's backend."""
    options = recipe.extract
    if options.backend == "transformers":
        from draftsmith.extract.transformers_backend import run_transformers

        yield from run_transformers(recipe, target.path, layer_ids, (one for one in requests if one is not None))
        return
    job = Job(
        engine_arguments=_engine_arguments(recipe, target, layer_ids),
        generate=options.mode == "generate",
        sampling={
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k or 0,
            "stop": list(options.stop),
            "detokenize": bool(options.stop),
        },
        seed=recipe.seed,
        compression=options.compression,
        window=2 * options.max_num_seqs,  # enough to keep the engine full, whatever the size of the data set
        max_model_len=recipe.engine.max_model_len,
    )
    yield from run_engines(
        job, requests, recipe.engine, num_workers=options.workers, directory=directory, handoff=handoff
    )


def _engine_arguments(recipe: Recipe, target: TargetInfo, layer_ids: Iterable[int]) -> dict[str, Any]:
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
    return {
        "model": str(target.path),
        "dtype": recipe.target.dtype,
        "max_model_len": recipe.engine.max_model_len,
        "enforce_eager": resolved(recipe.engine).enforce_eager,
        "tensor_parallel_size": recipe.engine.tensor_parallel_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": False,  # cached prefixes have no states of their own (reported length mismatches)
        "seed": recipe.seed,
        "speculative_config": speculative,
        **scheduling,
        **memory_arguments(recipe.engine, share=1 / options.workers if is_cpu() else 1.0),
    }


def _checked(extracted: Extracted) -> EncodedSequence:
    """Compare what the engine saved with what it was asked and what it answered."""
    request, prompt, response = extracted.request, extracted.prompt_token_ids, extracted.response_token_ids
    token_ids = torch.tensor(prompt + response, dtype=torch.int32)
    with_states = len(token_ids) - bool(response)
    saved, count = extracted.saved_token_ids, extracted.states.shape[0]
    if not torch.equal(saved, token_ids[:with_states]) or count != with_states:
        raise DraftsmithError(
            f"vLLM saved {count} states for {len(saved)} tokens of request {request.sample_id}, and {with_states} of the "
            f"tokens that it read should have states; tokens equal: {torch.equal(saved, token_ids[:with_states])}. "
            "Nothing wrong was stored; please report this with your vLLM version."
        )
    if request.loss_mask is not None:
        loss_mask = torch.tensor(request.loss_mask)
    else:
        loss_mask = torch.tensor(extracted.prompt_loss_mask + [True] * len(response))
    return EncodedSequence(request.sample_id, request.held_out, token_ids, loss_mask, extracted.states)
