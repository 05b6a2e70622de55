"""The extract stage: prompts to store.

One pass: the target answers the prompts, and the hidden states of prompt and response are saved as it does. Every sequence
is compared with what the engine said it produced before it goes into the store.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.config.sampling_options import unknown_token
from draftsmith.data.chat_template import Renderer
from draftsmith.data.conversations import RejectedRows
from draftsmith.data.images import text_of
from draftsmith.data.overlap import TRAINING_PROMPTS, PromptsFile
from draftsmith.data.prompts import split
from draftsmith.drafters import layer_ids_to_read
from draftsmith.engine.environment import is_cpu, resolved, states_arguments
from draftsmith.engine.fit import require_extraction
from draftsmith.engine.memory import weight_bytes
from draftsmith.engine.options import check_options, say_overruled
from draftsmith.engine.platform import current_platform
from draftsmith.extract.handoff_folder import handoff_folder
from draftsmith.extract.job import engine_arguments, engine_job, handoff_bytes, sequences_in_a_step, store_identity
from draftsmith.extract.requests import ExtractRequest, Requests, requests_of, require_prompts
from draftsmith.extract.sequences import checked
from draftsmith.extract.worker import run_engines
from draftsmith.run import cuda, stage
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar, console
from draftsmith.run.stage import StageRun
from draftsmith.store.format import StoreIdentity, nth_sample, read_manifest
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter, most_bytes, require_free_space
from draftsmith.target.family import uses_mrope
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.layer_ids import check_layer_ids, default_layer_ids
from draftsmith.target.prepare import Weights, prepare_target
from draftsmith.target.pretrained import tokenizer_of
from draftsmith.target.tensors import require_readable

_TEMPLATE_TOKENS = 16
"""What a chat template adds to a message, a guess."""


def run_extract(
    recipe: Recipe, run_dir: Path, *, training_follows: bool = False, finish: bool = False
) -> dict[str, Any]:
    """Make `run_dir/store`, or continue an unfinished one. A store finished for the same inputs is left as it is.

    Args:
        training_follows: refuse at once what the recipe's training could not use, else only say so; and what its evaluation could not ask.
        finish: answer no more training prompts, only the held-out ones that are left, and be done with it.

    Returns:
        The figures of `stage.json`.

    Raises:
        UserError: prompts, target or an existing store do not fit the recipe, training will need what the store lacks, or the
            engines do not fit into memory.
        DraftsmithError: every engine failed, or one returned other states than were asked for.
    """
    check_options(recipe.engine)
    run = StageRun("extract", run_dir / "store")
    options, directory = recipe.extract, run.directory
    require_prompts(recipe)
    weights: Weights = "all" if options.machines is None else "none"  # the machines download them
    target = describe_target(prepare_target(recipe.target, weights=weights), recipe.target)
    if (unknown := unknown_token({"stop_token_ids": options.stop_token_ids}, target.vocab_size)) is not None:
        raise UserError(f"`extract`: {unknown}.")
    layer_ids = options.layer_ids or default_layer_ids(target.num_hidden_layers)
    check_layer_ids(layer_ids, target.num_hidden_layers)
    try:
        if weights == "all":
            require_readable(target.path, trust_remote_code=target.trust_remote_code)
        layer_ids_to_read(recipe.train.drafter, target, layer_ids, where="this recipe's store")
        if (target.facts.sliding_window or recipe.engine.max_model_len) < recipe.engine.max_model_len:
            console.print(
                f"extract: every layer of this target attends to the last {target.facts.sliding_window} tokens, and vLLM limits its drafters "
                "likewise. They are trained without the limit: in texts longer than that, drafts will be worse than predicted.",
                highlight=False,
                soft_wrap=True,
            )
    except UserError as error:
        if training_follows:
            raise
        console.print(f"extract: not enough for this recipe's training: {error}", highlight=False, soft_wrap=True)
    if options.backend == "vllm":
        states_arguments(target.config, recipe.engine.options)  # raises where vLLM hands out no states
    identity = store_identity(recipe, target, layer_ids)
    rejected = RejectedRows()
    run_dir.mkdir(parents=True, exist_ok=True)
    prompts = PromptsFile(run_dir)
    requests = Requests(
        run_dir,
        requests_of(recipe, target.path, rejected, prompts, evaluation_follows=training_follows),
        dated=Renderer(tokenizer_of(target.path, trust_remote_code=target.trust_remote_code)).dated,
    )
    for line in rejected.lines():
        console.print(f"extract: not used: {line}", highlight=False, markup=False, soft_wrap=True)
    if requests.with_images:
        _check_images(target, recipe.engine.options)
    record = stage.read(directory)
    recorded = identity.recorded() if record is None else _recorded(identity, directory)
    inputs = digest([recorded, recipe.seed, requests.digest])
    if (finished := run.finished(inputs)) is not None:
        return finished
    if record is not None:
        if record["figures"].get("finished_early_from") == inputs:
            console.print(
                f"extract: {directory} is finished; {record['figures']['prompts_left_out']} prompts were left out with --finish",
                highlight=False,
                soft_wrap=True,
            )
            return record["figures"]
        raise UserError(_why_inputs_differ(directory, identity))

    if options.backend == "vllm" and options.machines is None:
        require_extraction(
            recipe.engine,
            options,
            target.config,
            target=target.name,
            target_bytes=weight_bytes(target.path, recipe.target.dtype, recipe.engine.options.get("quantization")),
            dtype=recipe.target.dtype,
            layers=len(layer_ids),
        )
    run.claim(fresh=False)
    # The writer comes first: it refuses a second process, whose start would remove the first one's handoff folder.
    new_tokens, seconds = 0, 0.0
    with StoreWriter(directory, identity, shard_tokens=options.shard_tokens, compression=options.compression) as writer:
        done = writer.held_out
        if sum(request.sample_id in done for request in requests) < len(done):
            raise UserError(
                f"The unfinished store at {directory} holds answers to prompts that are not in this recipe. Finish it with the "
                "recipe that began it, delete it, or choose another run with `-s name=OTHER`."
            )
        if any(done.get(request.sample_id, request.held_out) != request.held_out for request in requests):
            raise UserError(
                f"The unfinished store at {directory} was begun with another split: it holds out other prompts than this recipe does "
                "(`extract.held_out`, `extract.held_out_fraction`), and some that this recipe holds out would be trained on, or the other way "
                "around. Finish it with the recipe that began it, delete it, or choose another run with `-s name=OTHER`."
            )
        if finish and not any(one.sample_id in done and not one.held_out for one in requests):
            raise UserError(
                f"`--finish` makes a store of what was extracted, and {directory} has no training prompt yet. Extract without it "
                "first, for as long as you like: only whole shards are kept (`extract.shard_tokens`)."
            )

        def remaining() -> Iterator[ExtractRequest]:
            return (one for one in requests if one.sample_id not in done and (one.held_out or not finish))

        wanted = len(done) + sum(1 for _ in remaining())
        left_out = len(requests) - wanted
        store, handoff = _most_bytes(recipe, identity, remaining())
        if options.check_free_space:
            _require_free_space(directory, store + handoff)
        if done:
            console.print(f"extract: continuing {directory}: {len(done)} of {len(requests)} sequences are done")
        if left_out:
            console.print(f"extract: finishing early: {left_out} training prompts are left out")
        if len(done) < wanted:
            _say_options(recipe, target, identity)
            console.print(f"extract: starting {options.backend}", highlight=False)
            with Bar("extract", total=wanted, unit="prompts", done=len(done)) as bar:
                begun = time.time()
                if options.machines is not None:
                    from draftsmith.extract.cluster import extract_on_machines

                    progress = extract_on_machines(recipe, identity, remaining(), writer, directory)
                else:
                    progress = _extract_here(recipe, target, identity, remaining(), writer, directory, handoff)
                for sequences, new_tokens in progress:
                    seconds = time.time() - begun
                    bar.update(len(done) + sequences, tokens_per_second=new_tokens / seconds)
        requests.close()
        counts, answered = writer.close(), sorted(writer.sample_ids)
    figures: dict[str, Any] = counts | {
        "rows_skipped": rejected.figures(),
        "tokens_per_second": round(new_tokens / seconds, 1) if seconds else None,
        "engine_seconds": round(seconds, 1),
        "ran_on": None if options.machines is not None else _ran_on(recipe),
    }
    if left_out:  # another store than the recipe's whole one, to everything that is made of it
        figures |= {"finished_early_from": inputs, "prompts_left_out": left_out}
        inputs = digest([inputs, answered])
        prompts = _trained_on(recipe, run_dir, set(answered))
    sections = recipe.model_dump(mode="json", include={"seed", "target", "engine", "extract"})
    if options.machines is None:  # others' machines decide for themselves
        sections["engine"] = resolved(recipe.engine).model_dump(mode="json")
    prompts.publish(directory)
    return run.finish(inputs, figures, recipe=sections, files=(TRAINING_PROMPTS,))


def _trained_on(recipe: Recipe, folder: Path, answered: set[int]) -> PromptsFile:
    """The training prompts of a store that holds only the samples `answered`."""
    options, prompts = recipe.extract, PromptsFile(folder)
    conversations = split(
        options, whole=options.reads_whole, rejected=RejectedRows(), apart_from=recipe.evaluate.suites
    )
    for conversation, held_out in conversations:
        samples = {nth_sample(conversation.sample_id, sample) for sample in range(options.samples)}
        if not held_out and not samples.isdisjoint(answered):
            prompts.add(conversation.asked)
    return prompts


def _check_images(target: TargetInfo, engine_options: dict[str, Any]) -> None:
    """
    Raises:
        UserError: vLLM does not hand out states of what sees images, or lacks a package for that.
    """
    if find_spec("torchvision") is None:
        raise UserError(
            "Some prompts have images, and nearly all of vLLM's models that see images need torchvision, which is not installed here. Install its build "
            f"for torch {torch.__version__} (for a CPU: `pip install torchvision --index-url https://download.pytorch.org/whl/cpu`), or leave rows "
            "with images out."
        )
    if states_arguments(target.config, engine_options):
        raise UserError(
            f"Some prompts have images, and vLLM 0.32 hands out hidden states of {target.name} (type `{target.config.model_type}`) only "
            "through its transformers backend, which then reads text alone. Leave rows with images out, or use another target."
        )
    if uses_mrope(target.config):
        console.print(
            "extract: some prompts have images, and this target has M-RoPE. Drafters are trained on the tokens' places in the text, which "
            "is what vLLM's model runner on GPUs gives them. Its model runner on CPUs does not: there, drafts of `eagle` and `eagle3` after "
            "an image are worse than trained; answers are the same.",
            highlight=False,
            soft_wrap=True,
        )


def _say_options(recipe: Recipe, target: TargetInfo, identity: StoreIdentity) -> None:
    """Print which of `engine.options` extraction does not use, and whether its dtype is slow here."""
    emulated = recipe.extract.machines is None and not current_platform().has_bfloat16()
    if emulated and recipe.target.dtype == "bfloat16" and (advice := cuda.instead_of_emulated_bfloat16()):
        console.print(f"extract: `target.dtype` is bfloat16. {advice}", highlight=False, soft_wrap=True)
    if recipe.extract.machines is not None:
        return  # this machine may have neither their GPUs nor their vLLM
    if recipe.extract.backend == "vllm":
        arguments = engine_arguments(recipe, target, identity.layer_ids)
        say_overruled("extract", recipe.engine, arguments | {"kv_transfer_config": {}})
    elif recipe.engine.options:
        console.print("extract: engine.options are not used by `backend: transformers`", highlight=False)


def _ran_on(recipe: Recipe) -> dict[str, Any]:
    """What the recipe left to this machine: its GPUs, and how vLLM ran. Engines of a Ray cluster decide for themselves."""
    return {
        "gpus": current_platform().device_names(),
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
    room: int,
) -> Iterator[tuple[int, int]]:
    """Extract on this machine; after each sequence yield how many there are, and how many tokens they have.

    Both decrease when an engine dies.

    Args:
        room: bytes that handoff files take at most.
    """
    sequences = tokens = 0  # in shards
    if recipe.extract.backend == "transformers":
        from draftsmith.extract.transformers_backend import run_transformers

        for extracted in run_transformers(recipe, target.path, identity.layer_ids, requests):
            writer.append(checked(extracted))
            sequences += 1
            tokens += extracted.states.shape[0]
            yield sequences, tokens
        return
    with (
        handoff_folder(directory, room, shared=recipe.engine.on_ray) as handoff,
        closing(
            run_engines(
                engine_job(recipe, target, identity, room),
                requests,
                recipe.engine,
                num_workers=recipe.extract.workers,
                logs=directory,
                handoff=handoff,
                store=directory,
            )
        ) as progress,
    ):
        for shard, unwritten_sequences, unwritten_tokens in progress:
            if shard is not None:
                writer.adopt(shard)
                sequences += shard.sequences
                tokens += shard.tokens
            else:
                yield sequences + unwritten_sequences, tokens + unwritten_tokens


def _most_bytes(recipe: Recipe, identity: StoreIdentity, requests: Iterable[ExtractRequest]) -> tuple[int, int]:
    """Bytes of the store and of all handoff files at once, if every answer is as long as allowed."""
    options = recipe.extract
    at_once = sequences_in_a_step(options)
    longest: list[int] = []  # tokens of the longest requests, a heap
    tokens = sequences = 0
    for request in requests:
        length = _most_tokens(request, recipe.engine.max_model_len)
        tokens += length
        sequences += 1
        if len(longest) < at_once:
            heapq.heappush(longest, length)
        else:
            heapq.heappushpop(longest, length)
    store = most_bytes(identity, options.compression, tokens=tokens, sequences=sequences)
    return store, handoff_bytes(recipe, identity, tokens=sum(longest))


def _most_tokens(request: ExtractRequest, max_model_len: int) -> int:
    """The most tokens of a finished sequence. A later turn has no more tokens than characters, but for what the chat template adds."""
    length = request.prompt_tokens + request.max_tokens
    for messages in request.later:
        length += request.max_tokens + sum(len(text_of(one["content"])) + _TEMPLATE_TOKENS for one in messages)
    return min(length, max_model_len) if request.later else length


def _require_free_space(directory: Path, needed: int) -> None:
    """
    Raises:
        UserError: the disk has less than `needed` bytes free.
    """
    require_free_space(
        directory,
        needed,
        way_out="Free some space, put the run elsewhere (`--runs`), ask for fewer prompts (`extract.prompts.limit`), shorter "
        "answers (`extract.max_tokens`), fewer layers (`extract.layer_ids`) or smaller states (`extract.compression`); or "
        "start anyway with `-s extract.check_free_space=false`: a full disk stops the stage cleanly, and running it again "
        "once there is space continues it.",
    )


def _recorded(identity: StoreIdentity, directory: Path) -> dict[str, Any]:
    """`identity` as the finished store in `directory` would have recorded it: stores of before have settings of sampling where nothing is
    sampled, and their inputs were hashed with these."""
    if identity.sampling["mode"] != "prefill":
        return identity.recorded()
    there = read_manifest(directory)[0].sampling
    return identity.recorded() | ({"sampling": there} if there["mode"] == "prefill" else {})


def _why_inputs_differ(directory: Path, identity: StoreIdentity) -> str:
    """A finished store for other inputs is never thrown away silently: it may be a week of GPU time."""
    Store(directory).identity.require(identity, directory)
    return (
        f"The store at {directory} is finished, and this recipe asks for other prompts, another split or another seed. "
        "Delete it to extract again, or choose another run with `-s name=OTHER`."
    )
