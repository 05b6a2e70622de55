"""A bug planted in vLLM for tests of sampled answers: draft tokens are accepted more often than their probabilities allow.

An engine with the `worker_extension_cls` `By110` of this module imports it in its own process only and accepts 1.10 times as often; other
numbers work likewise.
"""

from typing import Any

from vllm import envs

if envs.VLLM_USE_V2_MODEL_RUNNER:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as sampler

    _UNIFORM = "tl_rand32"
else:
    from vllm.v1.sample import rejection_sampler as sampler

    _UNIFORM = "generate_uniform_probs"

_original = getattr(sampler, _UNIFORM)


def __getattr__(name: str) -> type:
    """A worker extension without content; importing it plants the bug."""
    if not name.removeprefix("By").isdigit():
        raise AttributeError(name)
    bias = int(name.removeprefix("By")) / 100

    def biased(*arguments: Any, **named: Any) -> Any:
        return _original(*arguments, **named) / bias

    setattr(sampler, _UNIFORM, biased)
    return type(name, (), {})
