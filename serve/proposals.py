"""Compare vLLM's draft tokens with those of the drafter's own module.

A misloaded checkpoint raises no error; it only lowers acceptance. So stock vLLM serves the drafter's directory, in a process in which
this package cannot be imported (except for drafters that need its plugin), and records every chain that it proposes with its
context; the module computes the same chains from transformers' hidden states.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.config.recipe import EngineConfig
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.engine import environment, speculation
from draftsmith.engine.process import log_tail
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console
from draftsmith.target.pretrained import tokenizer_of
from draftsmith.target.reference_states import reference_model, states_of

NEAR_TIE = 1e-3
"""Difference of logits: float32 sums in another order differ by less, different modules by far more."""
_MOST_TIES = 0.005
_K, _MAX_TOKENS = 3, 48
_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that reverses a list.",
    "List five things to pack for a week in the mountains.",
    "Translate into French: Where is the nearest station?",
    "A train goes 60 miles in an hour and a half. How fast is that?",
    "Write a short poem about a lighthouse.",
    "What is the difference between a virus and a bacterium?",
    "Summarise the plot of Romeo and Juliet.",
)


@dataclass(frozen=True)
class Served:
    """The draft tokens of one engine."""

    proposals: list[dict[str, Any]]
    """`request`, `context` (token ids so far) and `draft` (the chain proposed after it), in the order of the engine's steps."""
    counters: dict[str, Any]
    """vLLM's own `spec_decode` counters."""


RECORDER = Path(__file__).with_name("record_proposals.py")


def record(
    drafters: Sequence[tuple[Path, str]],
    target_dir: Path,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_tokens: int,
    dtype: str = "float32",
    recorder: Path = RECORDER,
    trust_remote_code: bool = False,
) -> list[Served]:
    """Have stock vLLM answer prompts greedily and record every chain that it proposes.

    Args:
        drafters: directories that vLLM loads, each with vLLM's name of its method; one engine after another.
        prompts: token ids.
        k: number of speculative tokens.
        dtype: that vLLM computes in.
        recorder: the program to run.

    Raises DraftsmithError: vLLM did not load or serve one; with the end of its log.
    """
    # Room beyond the longest answer: for contexts that nearly fill the model's length vLLM proposes token 0.
    job = {
        "target": str(target_dir), "dtype": dtype, "k": k,
        "drafters": [
            speculation.serving_spec(path).speculative | {"model": str(path), "method": method} for path, method in drafters
        ],
        "max_tokens": max_tokens, "longest": max(len(ids) for ids in prompts) + max_tokens + 32,
        "trust_remote_code": trust_remote_code, "parent": os.getpid(), "prompts": [list(ids) for ids in prompts],
        "stock": not any(
            asks(path) for path, _ in drafters for asks in (speculation.needs_plugin, speculation.reads_embeddings, speculation.needs_mend)
        ),
        "arguments": {
            name: value for _, method in drafters
            for name, value in speculation.target_arguments(target_dir, {"method": method}, trust_remote_code=trust_remote_code).items()
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        asked, answered, log = (Path(folder) / name for name in ("job.json", "out.json", "log"))
        asked.write_text(json.dumps(job))
        variables = os.environ | environment.vllm_environment(EngineConfig()) | environment.float32_environment(dtype)
        command = [sys.executable, str(recorder), str(asked), str(answered)]
        with log.open("w") as file:
            process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, start_new_session=True)
            try:
                status = process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its fork
                process.wait()
        if status != 0:
            raise DraftsmithError(
                f"vLLM could not serve {' or '.join(str(path) for path, _ in drafters)} with the target in {target_dir}. The "
                f"last lines of its log:\n{log_tail(log)}"
            )
        return [Served(**found) for found in json.loads(answered.read_text())]


def compare_proposals(
    served: Served,
    drafter: Drafter,
    target_dir: Path,
    *,
    trust_remote_code: bool = False,
    images_of: Callable[[list[int]], Mapping[str, torch.Tensor]] | None = None,
) -> list[int]:
    """Compare every proposal with the first choice for that context of the drafter's module, in float32.

    `images_of` gives for a context's tokens what the target's processor makes of its images (`states_of`); None where no prompt has any.
    Returns the number of tokens compared, by draft position. Raises DraftsmithError: one differs although the module's
    logits of the two are not nearly equal; or more than one in 200 are near-ties.
    """
    model = reference_model(target_dir, torch.float32, trust_remote_code=trust_remote_code)
    chains = _chains(served, drafter, model, images_of)
    steps = max((len(proposal["draft"]) for proposal in served.proposals), default=0)
    compared, different = [0] * steps, [0] * steps
    for proposal in served.proposals:
        row = len(proposal["context"]) - 2  # p: the context's last token is x_{p+1}
        for k, proposed in enumerate(proposal["draft"]):
            choices, normed, head = chains[proposal["request"]][k]
            best = int(drafter.draft_token_ids[choices[row]])
            compared[k] += 1
            if proposed == best:
                continue
            different[k] += 1
            place = (drafter.draft_token_ids == proposed).nonzero()
            logits = (head @ normed[row]).detach()
            logit_margin = float(logits.max() - logits[place[0, 0]]) if len(place) else float("inf")
            if logit_margin >= NEAR_TIE:
                raise DraftsmithError(
                    f"vLLM computes other draft tokens than the drafter's module: after {row + 2} tokens it proposed token {proposed} at "
                    f"draft position {k + 1}, where the module's first choice is {best}; their logits differ by {logit_margin:.3g}."
                )
            break  # the rest of the chain follows another token
    if any(apart > _MOST_TIES * count for apart, count in zip(different, compared, strict=True)):
        raise DraftsmithError(
            f"Too many of vLLM's draft tokens are near-ties of the module's: {different} of {compared}, by draft position."
        )
    return compared


_Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""One chain step: each row's first choice, the head's inputs, and the head. Logits themselves are large."""


@torch.no_grad()
def _chains(
    served: Served,
    drafter: Drafter,
    model: Any,
    images_of: Callable[[list[int]], Mapping[str, torch.Tensor]] | None,
) -> dict[str, list[_Step]]:
    """By request: the module's chains after each of its tokens."""
    longest: dict[str, list[int]] = {}  # the longest context of a request begins with all shorter ones
    for proposal in served.proposals:
        if len(proposal["context"]) > len(longest.get(proposal["request"], [])):
            longest[proposal["request"]] = proposal["context"]
    steps = max((len(proposal["draft"]) for proposal in served.proposals), default=0)
    chains = {}
    for request, tokens in longest.items():
        ids = torch.tensor(tokens)
        rows = len(ids) - 1
        batch = Batch(
            hidden_states=states_of(model, ids[:-1], drafter.config.layer_ids, images_of and images_of(tokens[:-1])),
            # Chains read their own draft tokens, so only the first of a row's next tokens matters.
            next_tokens=ids[1:, None].expand(-1, steps + 1),
            loss_weights=torch.ones(rows, steps),
            positions=torch.arange(rows),
            documents=torch.zeros(rows, dtype=torch.long),
        )
        chains[request] = [
            ((step.normed @ step.head.T).argmax(-1), step.normed, step.head)
            for step in drafter.chain(batch, steps=steps, autoregressive=True)
        ]
    return chains


def verify_served(
    drafter_dir: Path, drafter: Drafter, target_dir: Path, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Serve a drafter's directory with stock vLLM and compare its draft tokens for a few prompts with those of the module that it was
    made from, in float32. On GPUs vLLM's kernels for 8-bit weights have no float32: such a drafter is served in bfloat16 there.

    Returns `proposals` compared by draft position (not if inputs are rounded too, or in bfloat16: draft tokens may differ then), and
    how many of the `drafted` tokens the target `accepted`; or `not_served`, the reason why vLLM cannot serve it on this
    machine. Raises DraftsmithError: vLLM does not serve it, or proposes other tokens.
    """
    try:
        method = speculation.speculative_config(drafter_dir, 1)["method"]
    except UserError as reason:
        console.print(f"verify: compared logits only. {reason}")
        return {"not_served": str(reason)}
    exact = environment.is_cpu() or not speculation.has_8_bit_weights(drafter_dir)
    dtype = "float32" if exact else "bfloat16"
    console.print(f"verify: starting vLLM with the drafter, {len(_PROMPTS)} prompts in {dtype}")
    if speculation.reads_embeddings(drafter_dir):
        console.print(
            "verify: the drafter reads the target's embeddings (layer id 0); on GPUs, vLLM's eager mode (--enforce-eager) passes wrong "
            "ones unless Draftsmith is installed"
        )
    tokenizer = tokenizer_of(target_dir, trust_remote_code=trust_remote_code)
    prompts = [_prompt(tokenizer, text) for text in _PROMPTS]
    steps = min(_K, drafter.max_draft_tokens or _K)
    (served,) = record(
        [(drafter_dir, method)],
        target_dir,
        prompts,
        k=steps,
        max_tokens=_MAX_TOKENS,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    counted = {name: served.counters[f"vllm:spec_decode_num_{name}"] for name in ("draft_tokens", "accepted_tokens")}
    accepted = f"the target accepted {counted['accepted_tokens']:.0f} of {counted['draft_tokens']:.0f} tokens"
    figures: dict[str, Any] = {"drafted": counted["draft_tokens"], "accepted": counted["accepted_tokens"]}
    if not exact or speculation.rounds_inputs(drafter_dir):
        why = "with quantized inputs" if exact else f"in {dtype}"
        console.print(f"verified: vLLM serves it, and {accepted}; {why} its draft tokens may differ")
        return figures
    compared = compare_proposals(served, drafter, target_dir, trust_remote_code=trust_remote_code)
    console.print(f"verified: vLLM proposed the drafter's own tokens, {sum(compared)} compared; {accepted}")
    return figures | {"proposals": compared}


def _prompt(tokenizer: Any, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(text).input_ids)
    chat = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
