"""Suffix decoding in measurements: a prompt that is asked again finds no earlier answer of its own. See `serve/plugin/__init__.py`."""

import os
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

MEASURING = "DRAFTSMITH_MEASURING"
"""Environment variable: `1` in engines whose speed is measured with repeated prompts."""


def forget_repeated_prompts(proposer: type[Any]) -> None:
    """In place, vLLM's proposer for suffix decoding (vllm/v1/spec_decode/suffix_decoding.py): where `MEASURING` is set, Arctic's cache
    drops the answer to a prompt when that prompt is asked again. Answers to other prompts stay, as in a server."""
    original = proposer.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        if os.environ.get(MEASURING) != "1":
            return
        cache = self.suffix_cache
        start = cache.start_request
        answered: dict[bytes, Hashable] = {}  # the last request of every prompt

        def start_request(req_id: Hashable, prompt_token_ids: "Sequence[int] | np.ndarray[Any, Any]") -> None:
            prompt = np.asarray(prompt_token_ids, np.int32).tobytes()
            if (earlier := answered.get(prompt)) in cache.cached_requests:
                cache.evict_cached_response(earlier)
            answered[prompt] = req_id
            start(req_id, prompt_token_ids)

        cache.start_request = start_request

    proposer.__init__ = init
