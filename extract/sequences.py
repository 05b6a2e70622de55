"""What a backend returns for a request, and the check that every sequence passes before it is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.extract.requests import ExtractRequest
from draftsmith.run.errors import DraftsmithError
from draftsmith.store.codec import EncodedStates
from draftsmith.store.format import EncodedSequence


@dataclass(frozen=True)
class Extracted:
    """A finished request with its states."""

    request: ExtractRequest
    prompt_token_ids: list[int]
    """The request's, the images' placeholders expanded; with later turns, the prompt of the last turn answered, earlier answers
    included."""
    prompt_loss_mask: list[bool]
    """True at earlier answers in the prompt."""
    response_token_ids: list[int]
    """Empty where the prompt was only prefilled."""
    saved_token_ids: torch.Tensor
    """int32 [M]: the tokens that the states belong to, as the engine saved them."""
    states: EncodedStates
    """[M, L, H]"""


def checked(extracted: Extracted) -> EncodedSequence:
    """Compare what the engine saved with what it was asked and what it answered.

    Raises:
        DraftsmithError: the states belong to other tokens.
    """
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
    images = tuple(image["sha256"] for image in request.images)
    return EncodedSequence(request.sample_id, request.held_out, token_ids, loss_mask, extracted.states, images)
