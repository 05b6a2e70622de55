"""Suffix decoding where it is measured: an answer is not drafted from an earlier one to the same prompt."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftsmith.serve.plugin.suffix import MEASURING, forget_repeated_prompts

PROMPT, OTHER_PROMPT = [7, 1, 2, 3], [7, 4, 5, 6]
ANSWER = list(range(20, 60))
"""No token twice, so that nothing in a first answer can be drafted from the answer itself."""


@pytest.fixture
def proposer() -> Any:
    """A subclass of vLLM's proposer, with Arctic's cache, that may be changed."""
    pytest.importorskip("arctic_inference", reason="suffix decoding needs arctic-inference: `make suffix`")
    module = pytest.importorskip("vllm.v1.spec_decode.suffix_decoding")
    kind = type("Proposer", (module.SuffixDecodingProposer,), {})
    forget_repeated_prompts(kind)
    return kind


def make(proposer: Any) -> Any:
    speculative = SimpleNamespace(
        num_speculative_tokens=8,
        suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_max_cached_requests=1000,
        suffix_decoding_min_token_prob=0.1,
    )
    return proposer(SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(max_model_len=256)))


def drafted(proposer: Any, name: str, prompt: list[int]) -> int:
    """Draft tokens along `ANSWER`, a token at a time, as vLLM asks for them."""
    count = 0
    for length in range(1, len(ANSWER)):
        text = np.zeros((1, 256), np.int32)
        text[0, : len(prompt) + length] = prompt + ANSWER[:length]
        batch = SimpleNamespace(
            req_ids=[name],
            req_id_to_index={name: 0},
            num_tokens_no_spec=[len(prompt) + length],
            num_prompt_tokens=[len(prompt)],
            token_ids_cpu=text,
        )
        (draft,) = proposer.propose(8, batch, [[ANSWER[length - 1]]])
        count += len(draft)
    return count


def test_a_repeated_prompt_finds_no_answer_of_its_own(proposer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEASURING, "1")
    measured = make(proposer)
    assert [drafted(measured, name, PROMPT) for name in "abc"] == [0, 0, 0]
    assert drafted(measured, "d", OTHER_PROMPT) > 100, "the answer to another prompt helps, as in a server"
    assert drafted(measured, "e", PROMPT) > 100, "and so does that one"


def test_a_server_keeps_its_answers(proposer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEASURING, raising=False)
    served = make(proposer)
    assert drafted(served, "a", PROMPT) == 0
    assert drafted(served, "b", PROMPT) > 100


class Cache:
    """As much of Arctic's as is used."""

    def __init__(self) -> None:
        self.cached_requests: dict[str, list[int]] = {}
        self.evict_cached_response = self.cached_requests.pop

    def start_request(self, req_id: str, prompt: list[int]) -> None:
        self.cached_requests[req_id] = list(prompt)


def test_the_earlier_request_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arctic-inference: only the last request of a prompt stays, whatever dropped it in the meantime."""
    kind = type("Proposer", (), {"__init__": lambda self: setattr(self, "suffix_cache", Cache())})
    forget_repeated_prompts(kind)
    monkeypatch.setenv(MEASURING, "1")
    cache = kind().suffix_cache
    for name, prompt in (("a", PROMPT), ("b", OTHER_PROMPT), ("c", PROMPT)):
        cache.start_request(name, np.array(prompt, np.int32))
    assert set(cache.cached_requests) == {"b", "c"}
    cache.cached_requests.pop("c")  # the cache was full
    cache.start_request("d", PROMPT)
    assert set(cache.cached_requests) == {"b", "d"}
    monkeypatch.setenv(MEASURING, "0")
    cache = kind().suffix_cache
    for name in "ab":
        cache.start_request(name, PROMPT)
    assert set(cache.cached_requests) == {"a", "b"}
