"""A bug planted in vLLM, for test_lossless.py: guesses are accepted more often than their probabilities allow.

An engine whose `worker_extension_cls` names `By110` here imports this module in its own process, and in no other, and accepts 1.10
times as readily; any other number likewise.
"""

from typing import Any

from vllm.v1.sample import rejection_sampler

_right = rejection_sampler.generate_uniform_probs


def __getattr__(name: str) -> type:
    """The extension of this name, which adds nothing to the worker, and the bug."""
    if not name.removeprefix("By").isdigit():
        raise AttributeError(name)
    bias = int(name.removeprefix("By")) / 100

    def wrong(*arguments: Any, **named: Any) -> Any:
        return _right(*arguments, **named) / bias

    rejection_sampler.generate_uniform_probs = wrong
    return type(name, (), {})
