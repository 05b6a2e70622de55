"""The extract stage: prompts to store.

One pass: vLLM answers the prompts, and the states of prompt and response are saved as it does. Every sequence is
compared with what the engine said it produced before it goes into the store.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith import stage
from draftsmith.conversations import Conversation, Skips
from draftsmith.errors import DraftsmithError, UserError
from draftsmith.extract.engine import Ask, Extracted, Job, run_engines
from draftsmith.extract.rendering import Rendered, Renderer, Unrenderable
from draftsmith.progress import Bar, console
from draftsmith.prompts import split
from draftsmith.recipe import Recipe, digest
from draftsmith.store import Sequence, Store, StoreIdentity, StoreWriter, most_bytes, require_room
from draftsmith.target import TargetInfo, check_layer_ids, default_layer_ids, describe_target, prepare_target
from draftsmith.vllm_env import is_cpu, memory_arguments


@dataclass(frozen=True)
class ExtractRequest:
    """One prompt, or one whole text, as the engine gets it."""

    sample_id: int
    held_out: bool
    prompt_token_ids: list[int]
    max_tokens: int
    loss_mask: list[bool] | None = None
    """Which of `prompt_token_ids` are to be learnt; None where the target answers, and the answer is."""
    conversation: Conversation | None = None
    """With `later`: the messages that `prompt_token_ids` render."""
    later: tuple[list[dict[str, Any]], ...] = ()
    """Turns that the target answers after the first."""

    def identity(self) -> dict[str, Any]:
        """What its sequence depends on."""
        fields = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return fields | ({"conversation": self.conversation.messages} if self.conversation else {})


def run_extract(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Make `run_dir/store`, or continue it; nothing happens when it is finished for the same inputs.

    Returns:
        The figures of `stage.json`.

    Raises:
        UserError: prompts, target or an existing store do not fit the recipe.
        DraftsmithError: the engine produced states that are not what was asked for.
    """
    started = time.time()
    options, directory = recipe.extract, run_dir / "store"
    target = describe_target(prepare_target(recipe.target), recipe.target)
    layer_ids = options.layer_ids or default_layer_ids(target.num_hidden_layers)
    check_layer_ids(layer_ids, target.num_hidden_layers)
    identity = _identity(recipe, target, layer_ids)
    skips = Skips()
    requests = _requests(recipe, target, skips)
    inputs = digest([vars(identity), recipe.seed, [request.identity() for request in requests]])
    if stage.finished(directory, inputs):
        console.print(f"extract: {directory} is up to date")
        return stage.read(directory)["figures"]  # type: ignore[index]
    if stage.read(directory) is not None:
        raise UserError(_why_not_same(recipe, directory, identity))

    stage.claim(directory, fresh=False)
    # The writer first: it refuses a second one, whose spool would be removed here.
    writer = StoreWriter(directory, identity, shard_tokens=options.shard_tokens, compression=options.compression)
    shutil.rmtree(directory / "spool", ignore_errors=True)  # left by a run that was killed
    done = writer.sample_ids
    todo = {str(request.sample_id): request for request in requests if request.sample_id not in done}
    if options.check_free_space:
        _require_room(recipe, directory, identity, list(todo.values()))
    if done:
        console.print(
            f"extract: continuing {directory}: {len(requests) - len(todo)} of {len(requests)} sequences are there"
        )
    new_tokens = 0
    seconds = 0.0
    if todo:
        console.print(f"extract: starting {options.backend}", highlight=False)
        with Bar("extract", total=len(requests), unit="prompts", done=len(requests) - len(todo)) as bar:
            begun = time.time()
            for extracted in _extracted(recipe, target, tuple(layer_ids), todo, directory):
                sequence = _checked(extracted, todo[extracted.name])
                writer.append(sequence)
                new_tokens += len(sequence.hidden_states)
                seconds = time.time() - begun
                bar.step(tokens_per_second=new_tokens / seconds)
    counts = writer.close()
    shutil.rmtree(directory / "spool", ignore_errors=True)
    figures = counts | {
        "rows_skipped": skips.figures(),
        "tokens_per_second": round(new_tokens / seconds, 1) if seconds else None,
        "engine_seconds": round(seconds, 1),
    }
    sections = recipe.model_dump(mode="json", include={"seed", "target", "engine", "extract"})
    stage.finish(directory, stage="extract", inputs=inputs, recipe=sections, figures=figures, started=started)
    return figures


def _identity(recipe: Recipe, target: TargetInfo, layer_ids: Iterable[int]) -> StoreIdentity:
    options = recipe.extract
    return StoreIdentity(
        target=target.name,
        target_revision=target.revision,
        target_config_hash=target.config_hash,
        tokenizer_hash=target.tokenizer_hash,
        chat_template_hash=target.chat_template_hash,
        layer_ids=tuple(layer_ids),
        hidden_size=target.hidden_size,
        dtype=recipe.target.dtype,
        sampling=options.model_dump(
            mode="json",
            include={
                "mode",
                "temperature",
                "top_p",
                "top_k",
                "stop",
                "samples",
                "turns",
                "max_tokens",
                "held_out_max_tokens",
            },
        ),
        states="int8" if options.compression == "int8" else "exact",
    )


def _require_room(recipe: Recipe, directory: Path, identity: StoreIdentity, todo: list[ExtractRequest]) -> None:
    """Count every answer at its longest, and the spool at its fullest."""
    options = recipe.extract
    tokens = sorted((len(request.prompt_token_ids) + request.max_tokens for request in todo), reverse=True)
    waiting = tokens[: 2 * options.max_num_seqs]  # `Job.window`
    store = most_bytes(identity, options.compression, tokens=sum(tokens), sequences=len(tokens))
    spool = most_bytes(identity, "none", tokens=sum(waiting), sequences=len(waiting))
    require_room(
        directory,
        store + spool,
        way_out="Make room, put the run elsewhere (`--runs`), ask for fewer prompts (`extract.prompts.limit`), shorter "
        "answers (`extract.max_tokens`), fewer layers (`extract.layer_ids`) or smaller states (`extract.compression`); or "
        "start anyway with `-s extract.check_free_space=false`: a full disk stops it cleanly, and it continues when there is room.",
    )


def _why_not_same(recipe: Recipe, directory: Path, identity: StoreIdentity) -> str:
    """A finished store for other inputs is never thrown away silently: it may be a week of GPU time."""
    Store(directory).identity.require(identity, directory)
    return (
        f"The store at {directory} is finished, and this recipe asks for other prompts, another split or another seed. "
        f"Delete it to extract again, or choose another run with `-s name=OTHER`."
    )


def _requests(recipe: Recipe, target: TargetInfo, skips: Skips) -> list[ExtractRequest]:
    """The recipe's conversations as tokens, training first; what is left out is reported, counted in `skips`."""
    from transformers import AutoTokenizer

    whole = recipe.extract.mode == "prefill" or recipe.extract.turns == "all"
    renderer = Renderer(AutoTokenizer.from_pretrained(target.path))
    suites = [suite.prompts for suite in recipe.evaluate.suites.values() if suite.prompts != "held_out"]
    training, held_out = split(recipe.extract, whole=whole, skips=skips, apart_from=suites)
    requests = list(_tokenise(recipe, renderer, training, skips, held_out=False))
    if not requests:
        raise UserError(
            f"No training conversation can be used: {'; '.join(skips.lines()[:3])}. Where they are too long, raise "
            "engine.max_model_len or lower extract.max_tokens."
        )
    requests += _tokenise(recipe, renderer, held_out, skips, held_out=True)
    for line in skips.lines():
        console.print(f"extract: not used: {line}", highlight=False, markup=False, soft_wrap=True)
    return requests


def _tokenise(
    recipe: Recipe, renderer: Renderer, conversations: Iterable[Conversation], skips: Skips, *, held_out: bool
) -> Iterator[ExtractRequest]:
    """Conversations through the target's chat template, one at a time."""
    options, generate = recipe.extract, recipe.extract.mode == "generate"
    answer = options.response_tokens(held_out=held_out) if generate else 1
    for conversation in conversations:
        later: tuple[list[dict[str, Any]], ...] = ()
        opening = conversation
        turns = conversation.user_turns() if generate and conversation.messages else []
        if turns:
            opening, later = replace(conversation, messages=turns[0]), tuple(turns[1:])
        try:
            if generate:
                ids, mask = renderer.prompt(opening), None
            else:
                rendered: Rendered = renderer.text(conversation)
                ids, mask = rendered.token_ids, rendered.loss_mask
        except Unrenderable as reason:
            skips.add(str(reason), conversation.where)
            continue
        if len(ids) + answer > recipe.engine.max_model_len:
            skips.add("too long: no room for an answer in engine.max_model_len tokens", conversation.where)
        elif mask is not None and not any(mask):
            skips.add("no token of it is to be learnt", conversation.where)
        elif not ids:
            skips.add("no tokens", conversation.where)
        else:
            for sample in range(1 if held_out else options.samples):
                yield ExtractRequest(
                    sample_id=_nth_sample(conversation.sample_id, sample),
                    held_out=held_out,
                    prompt_token_ids=ids,
                    max_tokens=answer,
                    loss_mask=mask,
                    conversation=opening if later else None,
                    later=later,
                )


def _nth_sample(sample_id: int, number: int) -> int:
    """The id of a conversation's answer `number`: 63 bits, the conversation's own for the first."""
    if number == 0:
        return sample_id
    return int.from_bytes(hashlib.sha256(f"{sample_id}/{number}".encode()).digest()[:8], "big") >> 1


def _extracted(
    recipe: Recipe, target: TargetInfo, layer_ids: tuple[int, ...], todo: dict[str, ExtractRequest], directory: Path
) -> Iterator[Extracted]:
    """Every request of `todo` with its states, from the recipe's backend."""
    options = recipe.extract
    generate = options.mode == "generate"
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    asks = (
        Ask(
            name=name,
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            seed=(request.sample_id ^ recipe.seed) & 0x7FFFFFFF,
            conversation=request.conversation,
            later=request.later,
        )
        for name, request in todo.items()
    )
    if options.backend == "transformers":
        from draftsmith.extract.hf import run_transformers

        yield from run_transformers(
            target.path, recipe.target.dtype, layer_ids, asks, generate=generate, sampling=sampling
        )
        return
    job = Job(
        engine_arguments=_engine_arguments(recipe, target, layer_ids),
        generate=generate,
        sampling=sampling | {"top_k": options.top_k or 0, "stop": list(options.stop), "detokenize": bool(options.stop)},
        window=2 * options.max_num_seqs,  # enough to keep the engine full, whatever the data set's size
        max_model_len=recipe.engine.max_model_len,
    )
    yield from run_engines(job, asks, recipe.engine, workers=options.workers, directory=directory)


def _engine_arguments(recipe: Recipe, target: TargetInfo, layer_ids: Iterable[int]) -> dict[str, Any]:
    """vLLM's `extract_hidden_states` method; the worker adds our connector."""
    options = recipe.extract
    return {
        "model": str(target.path),
        "dtype": recipe.target.dtype,
        "max_model_len": recipe.engine.max_model_len,
        "enforce_eager": recipe.engine.enforce_eager,
        "tensor_parallel_size": recipe.engine.tensor_parallel_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "scheduler_cls": "draftsmith.extract.scheduler.ExtractionScheduler",
        "async_scheduling": False,
        "enable_prefix_caching": False,  # cached prefixes have no states of their own (reported length mismatches)
        "seed": recipe.seed,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        **memory_arguments(recipe.engine, share=1 / options.workers if is_cpu() else 1.0),
    }


def _checked(extracted: Extracted, request: ExtractRequest) -> Sequence:
    """Hold what the engine saved against what was asked and answered."""
    prompt, response = extracted.prompt_token_ids, extracted.response_token_ids
    token_ids = torch.tensor(prompt + response, dtype=torch.int32)
    with_states = len(token_ids) - bool(response)
    saved, states = extracted.saved_token_ids, extracted.hidden_states
    if not torch.equal(saved, token_ids[:with_states]) or len(states) != with_states:
        raise DraftsmithError(
            f"vLLM saved {len(states)} states for {len(saved)} tokens of request {extracted.name}, and it answered "
            f"{with_states} tokens that should have states; tokens equal: {torch.equal(saved, token_ids[:with_states])}. "
            "Nothing wrong was stored; please report this with your vLLM version."
        )
    if request.loss_mask is not None:
        loss_mask = torch.tensor(request.loss_mask)
    else:
        loss_mask = torch.tensor(extracted.prompt_loss_mask + [True] * len(response))
    return Sequence(request.sample_id, request.held_out, token_ids, loss_mask, states)
