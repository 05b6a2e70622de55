"""Extraction with transformers alone: slow and simple, the reference for the engine's states.

One sequence at a time: generate, then one forward pass over what the target read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from draftsmith.config.recipe import ExtractConfig, Recipe
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.sequences import Extracted
from draftsmith.store.codec import encode_states
from draftsmith.target.reference_states import reference_model, states_of


def run_transformers(
    recipe: Recipe, target_dir: Path, layer_ids: tuple[int, ...], requests: Iterable[ExtractRequest]
) -> Iterator[Extracted]:
    """Answer (or only prefill) each request and yield it with its states, in order.

    Sampled answers repeat from run to run (each request has its seed) but differ from vLLM's, whose sampler draws
    differently.

    Args:
        target_dir: the target as a Hugging Face directory.
        layer_ids: states to return, in the store's numbering.
    """
    options = recipe.extract
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, recipe.target.dtype)
    model = reference_model(target_dir, dtype, trust_remote_code=recipe.target.trust_remote_code).to(device)
    settings = _generation(model, options)
    model.generation_config = settings  # what the settings leave open is otherwise taken from the model's own
    for request in requests:
        ids = torch.tensor([request.prompt_token_ids], device=device)
        response: list[int] = []
        with torch.no_grad():
            if options.mode == "generate":
                torch.manual_seed(request.sampling_seed(recipe.seed))
                settings.max_new_tokens = request.max_tokens
                answered = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
                response = answered[0, ids.shape[1] :].tolist()
                ids = answered[:, :-1]  # the last token was sampled and never an input
        yield Extracted(
            request=request,
            prompt_token_ids=request.prompt_token_ids,
            prompt_loss_mask=[False] * len(request.prompt_token_ids),
            response_token_ids=response,
            saved_token_ids=ids[0].to(torch.int32).cpu(),
            states=encode_states(states_of(model, ids[0], layer_ids), options.compression),
        )


def _generation(model: Any, options: ExtractConfig) -> GenerationConfig:
    """Only what the recipe asks for: the model's own defaults (penalties, temperature) must not leak in."""
    own = model.generation_config.eos_token_id
    ends = [own] if isinstance(own, int) else list(own or [])
    settings: dict[str, Any] = {
        "do_sample": options.temperature > 0,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }
    if options.temperature > 0:
        settings |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k or 0}
    return GenerationConfig(**settings)
