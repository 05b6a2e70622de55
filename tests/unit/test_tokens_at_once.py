"""What extraction costs of the KV cache, by vLLM's own arithmetic on the sizes of published targets."""

import pytest

bench_tokens = pytest.importorskip("tests.benchmarks.bench_tokens")
pytest.importorskip("vllm.v1.core.kv_cache_utils")

TIMES = {"gpt-oss-20b": 12, "gpt-oss-120b": 12, "gpt-oss-120b on 8 GPUs": 60, "Gemma 3 4B": 3, "Gemma 3 27B": 3}
"""How many times as many tokens as with states in vLLM's cache there are at least: most of what the cache of states cost."""


@pytest.mark.parametrize("name", bench_tokens.TARGETS)
def test_states_cost_little_more_than_a_layer(name: str) -> None:
    target = bench_tokens.TARGETS[name]
    found = {way: bench_tokens.tokens(target, way) for way in bench_tokens.WAYS}
    # A layer more, and in a hybrid target a group of layers that is wider by one, in which others may be padded.
    layers = target.layers // target.every
    assert found["handed over"] >= found["alone"] * layers / (layers + 1) * 0.99
    assert found["handed over"] >= max(found[way] for way in ("cache", "lcm", "one group"))
    assert found["handed over"] >= TIMES.get(name, 1) * found["cache"]


def test_the_arithmetic_by_hand() -> None:
    """gpt-oss-20b: 256 blocks of 16 tokens without a window and 9 with one, 12 or 13 layers wide, each 32 KiB a block."""
    target = bench_tokens.TARGETS["gpt-oss-20b"]
    assert bench_tokens.tokens(target, "alone") == pytest.approx(2**30 / (265 * 12 * 2**15) * 4096, rel=1e-3)
    assert bench_tokens.tokens(target, "handed over") == pytest.approx(2**30 / (265 * 13 * 2**15) * 4096, rel=1e-3)
    # States in vLLM's cache: a block for each token.
    assert bench_tokens.tokens(target, "cache") == pytest.approx(2**30 / ((265 + 4096) * 12 * 2**15) * 4096, rel=1e-3)
