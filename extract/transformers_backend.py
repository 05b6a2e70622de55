"""The same extraction with transformers alone: slow, plain, and what the engine's states are held against.

One sequence at a time: generate, then one forward pass over what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from draftsmith.extract.worker import EngineRequest, Extracted
from draftsmith.store.codec import encode_states
from draftsmith.target.reference_states import states_of


def run_transformers(
    target_dir: Path, dtype: str, layer_ids: tuple[int, ...], asks: Iterable[EngineRequest], *, generate: bool, sampling: dict[str, Any]
) -> Iterator[Extracted]:  # fmt: skip
    """Answer (or only read) each prompt and yield it with its states, in order.

    Sampled answers repeat from run to run (each prompt has its seed) but are not vLLM's: its sampler draws otherwise.

    Args:
        target_dir: the target as a Hugging Face directory.
        layer_ids: states to return, in the store's numbering.
        sampling: `temperature`, `top_p` and `top_k`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(target_dir, dtype=getattr(torch, dtype)).eval().to(device)
    settings = _generation(model, sampling)
    model.generation_config = settings  # what the settings leave open is otherwise taken from the model's own
    for ask in asks:
        ids = torch.tensor([ask.prompt_token_ids], device=device)
        response: list[int] = []
        with torch.no_grad():
            if generate:
                torch.manual_seed(ask.seed)
                settings.max_new_tokens = ask.max_tokens
                answered = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
                response = answered[0, ids.shape[1] :].tolist()
                ids = answered[:, :-1]  # the last token was sampled and never an input
        states = encode_states(states_of(model, ids[0], layer_ids), ask.compression)
        mask = [False] * len(ask.prompt_token_ids)
        yield Extracted(ask.name, ask.prompt_token_ids, mask, response, ids[0].to(torch.int32).cpu(), states)


def _generation(model: Any, sampling: dict[str, Any]) -> GenerationConfig:
    """Nothing but what the recipe asks for: a model's own defaults (penalties, temperature) must not creep in."""
    own = model.generation_config.eos_token_id
    ends = [own] if isinstance(own, int) else list(own or [])
    temperature = sampling["temperature"]
    settings: dict[str, Any] = {
        "do_sample": temperature > 0,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }
    if temperature > 0:
        settings |= {"temperature": temperature, "top_p": sampling["top_p"], "top_k": sampling["top_k"] or 0}
    return GenerationConfig(**settings)
