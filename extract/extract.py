"""The extract stage: prompts to store.

One pass: vLLM answers the prompts, and the states of prompt and response are saved as it does. Every sequence is
compared with what the engine said it produced before it goes into the store.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load

from draftsmith import stage
from draftsmith.errors import DraftsmithError, UserError
from draftsmith.progress import Bar, console
from draftsmith.prompts import Prompt, training_and_held_out
from draftsmith.recipe import Recipe, digest
from draftsmith.store import Sequence, StoreIdentity, StoreWriter
from draftsmith.target import TargetInfo, check_layer_ids, default_layer_ids, describe_target, prepare_target
from draftsmith.vllm_env import vllm_environment

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

_FLUSH_SECONDS = 60.0


@dataclass(frozen=True)
class ExtractRequest:
    """One prompt as the engine gets it."""

    sample_id: int
    held_out: bool
    prompt_token_ids: list[int]


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
    train, held_out = training_and_held_out(options)
    requests, too_long = _tokenise(recipe, target, train, held_out)
    inputs = digest([vars(identity), recipe.seed, [vars(request) for request in requests]])
    if stage.finished(directory, inputs):
        console.print(f"extract: {directory} is up to date")
        return stage.read(directory)["figures"]  # type: ignore[index]
    if stage.read(directory) is not None:
        raise UserError(_why_not_same(recipe, directory, identity))

    stage.claim(directory, fresh=False)
    spool = directory / "spool"
    shutil.rmtree(spool, ignore_errors=True)  # left by a run that was killed
    spool.mkdir()
    writer = StoreWriter(directory, identity, shard_tokens=options.shard_tokens)
    done = writer.sample_ids
    todo = [request for request in requests if request.sample_id not in done]
    if done:
        console.print(
            f"extract: continuing {directory}: {len(requests) - len(todo)} of {len(requests)} sequences are there"
        )
    seconds = 0.0
    new_tokens = 0
    if todo:
        llm = _engine(recipe, target, layer_ids, spool)
        begun = time.time()
        with Bar("extract", total=len(requests), unit="prompts", done=len(requests) - len(todo)) as bar:
            for count, sequence in enumerate(_sequences(llm, recipe, todo, spool), start=len(requests) - len(todo) + 1):
                writer.append(sequence)
                new_tokens += len(sequence.hidden_states)
                bar.update(count, tokens_per_second=new_tokens / (time.time() - begun))
        seconds = time.time() - begun
        del llm
    counts = writer.close()
    shutil.rmtree(spool, ignore_errors=True)
    figures = counts | {
        "prompts_too_long": too_long,
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
        sampling={"mode": options.mode, "temperature": options.temperature, "max_tokens": options.max_tokens},
    )


def _why_not_same(recipe: Recipe, directory: Path, identity: StoreIdentity) -> str:
    """A finished store for other inputs is never thrown away silently: it may be a week of GPU time."""
    from draftsmith.store import Store

    Store(directory, verify=False).identity.require(identity, directory)
    return (
        f"The store at {directory} is finished, and this recipe asks for other prompts, another split or another seed. "
        f"Delete it to extract again, or choose another run with `-s name=OTHER`."
    )


def _tokenise(
    recipe: Recipe, target: TargetInfo, train: list[Prompt], held_out: list[Prompt]
) -> tuple[list[ExtractRequest], int]:
    """Prompts through the target's chat template; also how many were left out for their length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target.path)
    if tokenizer.chat_template is None:
        raise UserError(
            f"The tokenizer of {target.name} has no chat template, so prompts cannot be put to it as a user would."
        )
    room = recipe.engine.max_model_len - (recipe.extract.max_tokens if recipe.extract.mode == "generate" else 1)
    requests, too_long = [], 0
    for prompts, is_held_out in ((train, False), (held_out, True)):
        for prompt in prompts:
            ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
            if len(ids) > room:
                too_long += 1
            else:
                requests.append(ExtractRequest(prompt.sample_id, is_held_out, list(ids)))
    if too_long:
        console.print(
            f"extract: {too_long} prompts do not fit into {room} tokens and are left out (engine.max_model_len)"
        )
    if not requests:
        raise UserError(f"No prompt fits into {room} tokens; raise engine.max_model_len or lower extract.max_tokens.")
    return requests, too_long


def _engine(recipe: Recipe, target: TargetInfo, layer_ids: Iterable[int], spool: Path) -> LLM:
    """Start vLLM with our connector. Environment first: vLLM reads it when imported."""
    os.environ.update(vllm_environment(recipe.engine))
    console.print("extract: starting vLLM")
    from vllm import LLM

    return LLM(
        model=str(target.path),
        dtype=recipe.target.dtype,
        max_model_len=recipe.engine.max_model_len,
        enforce_eager=recipe.engine.enforce_eager,
        gpu_memory_utilization=recipe.engine.gpu_memory_utilization,
        tensor_parallel_size=recipe.engine.tensor_parallel_size,
        max_num_seqs=recipe.extract.max_num_seqs,
        max_num_batched_tokens=recipe.extract.max_num_batched_tokens,
        enable_prefix_caching=False,  # cached prefixes have no states of their own (reported length mismatches)
        seed=recipe.seed,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "draftsmith.extract.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"spool_directory": str(spool.resolve())},
        },
    )


def _sequences(llm: LLM, recipe: Recipe, todo: list[ExtractRequest], spool: Path) -> Iterator[Sequence]:
    """Run every request and yield its checked sequence, in the order in which they finish."""
    engine = llm.llm_engine
    window = 2 * recipe.extract.max_num_seqs  # enough to keep the engine full, whatever the data set's size
    requests = {str(number): request for number, request in enumerate(todo)}
    waiting = iter(requests.items())
    written: list[RequestOutput] = []  # finished, their spool files still to be read

    while True:
        for name, request in islice(waiting, window - engine.get_num_unfinished_requests()):
            engine.add_request(name, {"prompt_token_ids": request.prompt_token_ids}, _sampling(recipe, request))
        if not engine.has_unfinished_requests():
            break
        written += [output for output in engine.step() if output.finished]
        ready = [output for output in written if (spool / _spool_file(output)).exists()]
        written = [output for output in written if output not in ready]
        for output in ready:
            yield _read(spool, output, requests[output.request_id], recipe)

    # The engine is idle: a save that rode on its next step has not happened unless there is one more step.
    deadline = time.time() + _FLUSH_SECONDS
    while written:
        output = written[0]
        if (spool / _spool_file(output)).exists():
            yield _read(spool, written.pop(0), requests[output.request_id], recipe)
        elif time.time() > deadline:
            raise DraftsmithError(
                f"vLLM answered {len(written)} prompts and did not hand over their hidden states within {_FLUSH_SECONDS:.0f} s. "
                "Run the stage again: it continues with the sequences that are missing."
            )
        else:
            _step_once(llm)


def _step_once(llm: LLM) -> None:
    from vllm import SamplingParams

    from draftsmith.extract.connector import DISCARD_KEY

    params = SamplingParams(max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": {DISCARD_KEY: True}})
    llm.generate([{"prompt_token_ids": [0]}], params, use_tqdm=False)
    time.sleep(0.05)


def _sampling(recipe: Recipe, request: ExtractRequest) -> Any:
    from vllm import SamplingParams

    from draftsmith.extract.connector import PROMPT_ONLY_KEY

    generate = recipe.extract.mode == "generate"
    return SamplingParams(
        temperature=recipe.extract.temperature,
        max_tokens=recipe.extract.max_tokens if generate else 1,
        seed=(request.sample_id ^ recipe.seed) & 0x7FFFFFFF,  # its own, so that order and batch do not matter
        detokenize=False,
        extra_args={"kv_transfer_params": {PROMPT_ONLY_KEY: not generate}},
    )


def _spool_file(output: RequestOutput) -> str:
    from draftsmith.extract.connector import SPOOL_KEY

    file = (output.kv_transfer_params or {}).get(SPOOL_KEY)
    if file is None:
        raise DraftsmithError(f"vLLM finished request {output.request_id} without saving its hidden states.")
    return str(file)


def _read(spool: Path, output: RequestOutput, request: ExtractRequest, recipe: Recipe) -> Sequence:
    """Read a spool file and hold it against what was asked and answered."""
    path = spool / _spool_file(output)
    tensors = load(path.read_bytes())
    path.unlink()
    response = list(output.outputs[0].token_ids) if recipe.extract.mode == "generate" else []
    token_ids = torch.tensor(request.prompt_token_ids + response, dtype=torch.int32)
    with_states = len(token_ids) - bool(response)
    saved, states = tensors["token_ids"], tensors["hidden_states"]
    if not torch.equal(saved, token_ids[:with_states]) or len(states) != with_states:
        raise DraftsmithError(
            f"vLLM saved {len(states)} states for {len(saved)} tokens of request {output.request_id}, and it answered "
            f"{with_states} tokens that should have states; tokens equal: {torch.equal(saved, token_ids[:with_states])}. "
            "Nothing wrong was stored; please report this with your vLLM version."
        )
    loss_mask = torch.arange(len(token_ids)) >= (len(request.prompt_token_ids) if response else 0)
    return Sequence(request.sample_id, request.held_out, token_ids, loss_mask, states)
