"""The extract stage: prompts to store.

One pass: vLLM answers the prompts, and the states of prompt and response are saved as it does. Every sequence is
compared with what the engine said it produced before it goes into the store.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from draftsmith.config.loading import digest
from draftsmith.config.recipe import ExtractConfig, Recipe
from draftsmith.data.conversations import RejectedRows
from draftsmith.data.overlap import TRAINING_PROMPTS, PromptsFile
from draftsmith.engine.environment import is_cpu, memory_arguments, resolved
from draftsmith.extract.handoff_folder import handoff_folder
from draftsmith.extract.requests import ExtractRequest, Requests, requests_of
from draftsmith.extract.worker import EngineRequest, Extracted, Job, run_engines
from draftsmith.run import stage
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.process import disable_malloc_trim, trim_malloc
from draftsmith.run.progress import Bar, console
from draftsmith.store.format import EncodedSequence, StoreIdentity
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter, most_bytes, require_free_space
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.layer_ids import check_layer_ids, default_layer_ids
from draftsmith.target.prepare import prepare_target


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
    identity = store_identity(recipe, target, layer_ids)
    skips = RejectedRows()
    run_dir.mkdir(parents=True, exist_ok=True)
    prompts = PromptsFile(run_dir)
    requests = Requests(run_dir, requests_of(recipe, target.path, skips, prompts))
    for line in skips.lines():
        console.print(f"extract: not used: {line}", highlight=False, markup=False, soft_wrap=True)
    inputs = digest([vars(identity), recipe.seed, requests.digest])
    if stage.finished(directory, inputs):
        console.print(f"extract: {directory} is up to date")
        return stage.read(directory)["figures"]  # type: ignore[index]
    if stage.read(directory) is not None:
        raise UserError(_why_not_same(recipe, directory, identity))

    stage.claim(directory, fresh=False)
    # The writer first: it refuses a second one, whose handoff would be removed here.
    new_tokens, seconds = 0, 0.0
    with StoreWriter(directory, identity, shard_tokens=options.shard_tokens, compression=options.compression) as writer:
        done = writer.sample_ids
        if sum(request.sample_id in done for request in requests) < len(done):
            raise UserError(
                f"The unfinished store at {directory} holds answers to prompts that are not in this recipe. Run the recipe that "
                "began it to finish it, or delete it, or choose another run with `-s name=OTHER`."
            )
        store, handoff = _most_bytes(recipe, identity, (one for one in requests if one.sample_id not in done))
        if options.check_free_space:
            _require_room(directory, store + handoff)
        if done:
            console.print(f"extract: continuing {directory}: {len(done)} of {len(requests)} sequences are there")
        if len(done) < len(requests):
            todo = (request for request in requests if request.sample_id not in done)
            console.print(f"extract: starting {options.backend}", highlight=False)
            with Bar("extract", total=len(requests), unit="prompts", done=len(done)) as bar:
                begun = time.time()
                if options.machines is not None:
                    from draftsmith.extract.cluster import extract_on_machines

                    progress = extract_on_machines(recipe, identity, todo, writer, directory)
                else:
                    progress = _extract_here(recipe, target, identity, todo, writer, directory, handoff)
                for sequences, new_tokens in progress:
                    seconds = time.time() - begun
                    bar.update(len(done) + sequences, tokens_per_second=new_tokens / seconds)
        requests.close()
        counts = writer.close()
    figures = counts | {
        "rows_skipped": skips.figures(),
        "tokens_per_second": round(new_tokens / seconds, 1) if seconds else None,
        "engine_seconds": round(seconds, 1),
        "ran_on": None if options.machines is not None else _ran_on(recipe),
    }
    sections = recipe.model_dump(mode="json", include={"seed", "target", "engine", "extract"})
    sections["engine"] = resolved(recipe.engine).model_dump(mode="json")
    prompts.publish(directory)
    stage.finish(
        directory, stage="extract", inputs=inputs, recipe=sections, figures=figures, started=started,
        files=(TRAINING_PROMPTS,),
    )  # fmt: skip
    return figures


def _ran_on(recipe: Recipe) -> dict[str, Any]:
    """What was left to this machine: its GPUs, and how vLLM ran; engines of a Ray cluster decide for themselves."""
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "enforce_eager": resolved(recipe.engine).enforce_eager,
        "scheduler": "draftsmith" if is_cpu() else "vllm",
    }


def _extract_here(
    recipe: Recipe,
    target: TargetInfo,
    identity: StoreIdentity,
    requests: Iterable[ExtractRequest],
    writer: StoreWriter,
    directory: Path,
    handoff: int,
) -> Iterator[tuple[int, int]]:
    """Extract on this machine, `handoff` bytes at most being handed over. After each sequence: how many there are, and how many
    tokens they have."""
    tokens, threads = 0, torch.get_num_threads()
    disable_malloc_trim()
    torch.set_num_threads(1)  # the engines' own threads wait for one another, so a core taken from one stops them all
    try:
        with (
            handoff_folder(directory, handoff) as handoff_files,
            closing(extracted_sequences(recipe, target, identity, requests, directory, handoff_files)) as sequences,
        ):
            for count, sequence in enumerate(sequences, 1):
                writer.append(sequence)
                tokens += sequence.states.shape[0]
                yield count, tokens
    finally:
        torch.set_num_threads(threads)
        trim_malloc()


def store_identity(recipe: Recipe, target: TargetInfo, layer_ids: Iterable[int]) -> StoreIdentity:
    """What the recipe's store is made from.

    Args:
        layer_ids: those of the recipe, or the default ones.
    """
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
        )
        | ({"seed": recipe.seed} if options.temperature > 0 else {}),
        states="int8" if options.compression == "int8" else "exact",
    )


def spool_sequences(options: ExtractConfig) -> int:
    """Sequences whose states can lie in the handoff of a machine, at most (`Job.window`)."""
    return 2 * options.max_num_seqs * options.workers


def _most_bytes(recipe: Recipe, identity: StoreIdentity, todo: Iterable[ExtractRequest]) -> tuple[int, int]:
    """Of the store and of the handoff at its fullest, with every answer at its longest."""
    options = recipe.extract
    at_once = spool_sequences(options)
    waiting: list[int] = []  # the longest ones' tokens, a heap
    tokens = sequences = 0
    for request in todo:
        length = len(request.prompt_token_ids) + request.max_tokens
        tokens += length
        sequences += 1
        if len(waiting) < at_once:
            heapq.heappush(waiting, length)
        else:
            heapq.heappushpop(waiting, length)
    store = most_bytes(identity, options.compression, tokens=tokens, sequences=sequences)
    return store, most_bytes(identity, options.compression, tokens=sum(waiting), sequences=len(waiting))


def _require_room(directory: Path, needed: int) -> None:
    """
    Raises:
        UserError: the disk has no room for so many bytes.
    """
    require_free_space(
        directory,
        needed,
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


def extracted_sequences(
    recipe: Recipe,
    target: TargetInfo,
    identity: StoreIdentity,
    requests: Iterable[ExtractRequest | None],
    directory: Path,
    handoff: Path,
) -> Generator[EncodedSequence, None, None]:
    """Have every request answered on this machine; yield its checked sequence when it is finished, in no order.

    Args:
        requests: read as engines have room; None as in `run_engines`.
        directory: for logs.
        handoff: an empty folder for handoff files.

    Raises:
        DraftsmithError: every engine failed, or produced states that are not what was asked for.
    """
    flying: dict[str, ExtractRequest] = {}

    def asks() -> Iterator[EngineRequest | None]:
        for request in requests:
            if request is not None:
                flying[request.name] = request
            yield None if request is None else request.ask(recipe.seed, recipe.extract.compression)

    for extracted in _extracted(recipe, target, identity.layer_ids, asks(), directory, handoff):
        yield _checked(extracted, flying.pop(extracted.name))


def _extracted(
    recipe: Recipe,
    target: TargetInfo,
    layer_ids: tuple[int, ...],
    asks: Iterable[EngineRequest | None],
    directory: Path,
    handoff: Path,
) -> Iterator[Extracted]:
    """Every one of `asks` with its states, from the recipe's backend."""
    options = recipe.extract
    generate = options.mode == "generate"
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    if options.backend == "transformers":
        from draftsmith.extract.transformers_backend import run_transformers

        some = (ask for ask in asks if ask is not None)
        yield from run_transformers(
            target.path, recipe.target.dtype, layer_ids, some, generate=generate, sampling=sampling
        )
        return
    job = Job(
        engine_arguments=_engine_arguments(recipe, target, layer_ids),
        generate=generate,
        sampling=sampling | {"top_k": options.top_k or 0, "stop": list(options.stop), "detokenize": bool(options.stop)},
        window=2 * options.max_num_seqs,  # enough to keep the engine full, whatever the data set's size
        max_model_len=recipe.engine.max_model_len,
    )
    yield from run_engines(job, asks, recipe.engine, workers=options.workers, directory=directory, handoff=handoff)


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
        # vLLM's own scheduler, one step ahead of the GPU, told to let the drafts go. A decoding sequence then has one row in
        # every step, which is what full CUDA graphs are captured for. vLLM caches the states all the same (model runner V2).
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


def _checked(extracted: Extracted, request: ExtractRequest) -> EncodedSequence:
    """Hold what the engine saved against what was asked and answered."""
    prompt, response = extracted.prompt_token_ids, extracted.response_token_ids
    token_ids = torch.tensor(prompt + response, dtype=torch.int32)
    with_states = len(token_ids) - bool(response)
    saved, count = extracted.saved_token_ids, extracted.states.shape[0]
    if not torch.equal(saved, token_ids[:with_states]) or count != with_states:
        raise DraftsmithError(
            f"vLLM saved {count} states for {len(saved)} tokens of request {extracted.name}, and it answered "
            f"{with_states} tokens that should have states; tokens equal: {torch.equal(saved, token_ids[:with_states])}. "
            "Nothing wrong was stored; please report this with your vLLM version."
        )
    if request.loss_mask is not None:
        loss_mask = torch.tensor(request.loss_mask)
    else:
        loss_mask = torch.tensor(extracted.prompt_loss_mask + [True] * len(response))
    return EncodedSequence(request.sample_id, request.held_out, token_ids, loss_mask, extracted.states)
