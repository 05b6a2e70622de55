"""A bug planted in vLLM, for the tests of sampled answers: guesses are accepted more often than their probabilities allow.

An engine whose `worker_extension_cls` names `By110` here imports this module in its own process, and in no other, and accepts 1.10
times as readily; any other number likewise.
"""

from typing import Any

from vllm import envs

if envs.VLLM_USE_V2_MODEL_RUNNER:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as sampler

    _UNIFORM = "tl_rand32"
else:
    from vllm.v1.sample import rejection_sampler as sampler

    _UNIFORM = "generate_uniform_probs"

_right = getattr(sampler, _UNIFORM)


def __getattr__(name: str) -> type:
    """The extension of this name, which adds nothing to the worker, and the bug."""
    if not name.removeprefix("By").isdigit():
        raise AttributeError(name)
    bias = int(name.removeprefix("By")) / 100

    def wrong(*arguments: Any, **named: Any) -> Any:
        return _right(*arguments, **named) / bias

    setattr(sampler, _UNIFORM, wrong)
    return type(name, (), {})
