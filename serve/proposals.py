"""Whether vLLM proposes from a drafter's directory what the drafter's own module does.

A server that misreads a checkpoint says nothing: acceptance is low, and that is all. So stock vLLM serves the directory, in a
process of its own in which this package cannot be imported (except for drafters that need its plugin); every chain that it proposes is written down with its context;
and the module computes the same chains from transformers' states.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.config.recipe import EngineConfig
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.engine import environment
from draftsmith.engine.process import log_tail
from draftsmith.engine.speculation import needs_plugin, reads_embeddings, rounds_inputs, speculative_config
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console
from draftsmith.target.reference_states import states_of

NEAR_TIE = 1e-3
"""Logits; float32 sums taken in another order differ by less, and a real difference between modules by far more."""
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
    """What an engine proposed."""

    proposals: list[dict[str, Any]]
    """`request`, `context` (token ids so far) and `draft` (the chain proposed to follow), in the order of the engine's steps."""
    counters: dict[str, Any]
    """vLLM's own `spec_decode` counters."""


RECORDER = Path(__file__).with_name("record_proposals.py")


def record(
    drafters: Sequence[tuple[Path, str]], target_dir: Path, prompts: Sequence[Sequence[int]], *, k: int, max_tokens: int,
    recorder: Path = RECORDER,
) -> list[Served]:  # fmt: skip
    """Have stock vLLM answer prompts greedily in float32, and write down every chain that it proposes.

    Args:
        drafters: directories as vLLM loads them, each with vLLM's name of its method; one engine after another.
        prompts: token ids.
        k: speculative tokens.
        max_tokens: of an answer.
        recorder: the program.

    Raises:
        DraftsmithError: vLLM did not load or serve one; with the end of its log.
    """
    # Room beyond the longest answer: for contexts that nearly fill the model's length vLLM proposes token 0.
    job = {
        "target": str(target_dir), "drafters": [{"path": str(path), "method": method} for path, method in drafters], "k": k,
        "max_tokens": max_tokens, "longest": max(len(ids) for ids in prompts) + max_tokens + 32,
        "prompts": [list(ids) for ids in prompts], "stock": not any(needs_plugin(path) or reads_embeddings(path) for path, _ in drafters),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        asked, answered, log = (Path(folder) / name for name in ("job.json", "out.json", "log"))
        asked.write_text(json.dumps(job))
        variables = os.environ | environment.vllm_environment(EngineConfig())
        with log.open("w") as file:
            done = subprocess.run(
                [sys.executable, str(recorder), str(asked), str(answered)],
                env=variables,
                stdout=file,
                stderr=file,
                check=False,
            )
        if done.returncode != 0:
            raise DraftsmithError(
                f"vLLM could not serve {' or '.join(str(path) for path, _ in drafters)} with the target in {target_dir}. The "
                f"last lines of its log:\n{log_tail(log)}"
            )
        return [Served(**found) for found in json.loads(answered.read_text())]


def compare_proposals(served: Served, drafter: Drafter, target_dir: Path) -> list[int]:
    """Hold every proposal against the module's own first choice for that context.

    Args:
        drafter: in float32, as trained or as read back.
        target_dir: a Hugging Face directory.

    Returns:
        How many were compared, by chain step.

    Raises:
        DraftsmithError: one is another, and not because the module's own logits of the two are as good as equal; or more than
            one in 200 are such ties.
    """
    chains = _chains(served, drafter, target_dir)
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
            theirs = (drafter.draft_token_ids == proposed).nonzero()
            logits = (head @ normed[row]).detach()
            gap = float(logits.max() - logits[theirs[0, 0]]) if len(theirs) else float("inf")
            if gap >= NEAR_TIE:
                raise DraftsmithError(
                    f"vLLM reads the drafter otherwise than it was made: after {row + 2} tokens it proposed token {proposed} at "
                    f"step {k + 1}, where the drafter's first choice is {best}; their logits are {gap:.3g} apart."
                )
            break  # the chain goes on from another token
    if any(apart > _MOST_TIES * count for apart, count in zip(different, compared, strict=True)):
        raise DraftsmithError(
            f"vLLM's proposals are near-ties of the drafter's too often: {different} of {compared}, by chain step."
        )
    return compared


_Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of a chain step, for each row: its first choice, what the head reads, and the head. Logits themselves are large."""


@torch.no_grad()
def _chains(served: Served, drafter: Drafter, target_dir: Path) -> dict[str, list[_Step]]:
    """Of each request, the module's chains after each of its tokens."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    longest: dict[str, list[int]] = {}  # it holds all the shorter ones
    for proposal in served.proposals:
        if len(proposal["context"]) > len(longest.get(proposal["request"], [])):
            longest[proposal["request"]] = proposal["context"]
    steps = max((len(proposal["draft"]) for proposal in served.proposals), default=0)
    chains = {}
    for request, tokens in longest.items():
        ids = torch.tensor(tokens)
        rows = len(ids) - 1
        batch = Batch(
            hidden_states=states_of(model, ids[:-1], drafter.config.layer_ids),
            # Chains read their own guesses, so of what follows a row only the next token counts.
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


def verify_served(drafter_dir: Path, drafter: Drafter, target_dir: Path) -> dict[str, Any]:
    """Serve a drafter's directory with stock vLLM and compare what it proposes for a few prompts.

    Args:
        drafter: what the directory was made of, in float32.

    Returns:
        `proposals` compared by chain step (not where inputs are rounded too: proposals may differ then), and `accepted` by
        the target of `drafted` tokens; `not_served`, why, where vLLM
        cannot serve such a drafter on this machine.

    Raises:
        DraftsmithError: vLLM does not serve it, or not as it was made.
    """
    try:
        method = speculative_config(drafter_dir, 1)["method"]
    except UserError as reason:
        console.print(f"verify: only logits were compared. {reason}")
        return {"not_served": str(reason)}
    console.print(f"verify: starting vLLM with the drafter, {len(_PROMPTS)} prompts in float32")
    if reads_embeddings(drafter_dir):
        console.print(
            "verify: the drafter reads the target's embeddings (layer id 0), which vLLM's eager mode (--enforce-eager) gives "
            "wrongly on GPUs where Draftsmith is not installed"
        )
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    prompts = [_prompt(tokenizer, text) for text in _PROMPTS]
    steps = min(_K, drafter.max_draft_tokens or _K)
    (served,) = record([(drafter_dir, method)], target_dir, prompts, k=steps, max_tokens=_MAX_TOKENS)
    counted = {name: served.counters[f"vllm:spec_decode_num_{name}"] for name in ("draft_tokens", "accepted_tokens")}
    accepted = f"the target accepted {counted['accepted_tokens']:.0f} of {counted['draft_tokens']:.0f} tokens"
    figures: dict[str, Any] = {"drafted": counted["draft_tokens"], "accepted": counted["accepted_tokens"]}
    if rounds_inputs(drafter_dir):
        console.print(f"verified: vLLM serves it, and {accepted}; with rounded inputs it may propose other tokens")
        return figures
    compared = compare_proposals(served, drafter, target_dir)
    console.print(f"verified: vLLM proposed what the drafter does, {sum(compared)} tokens compared; {accepted}")
    return figures | {"proposals": compared}


def _prompt(tokenizer: Any, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(text).input_ids)
    chat = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
