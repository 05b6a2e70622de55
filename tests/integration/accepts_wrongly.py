"""A bug planted in vLLM, for test_lossless.py: guesses are accepted more often than their probabilities allow.

An engine whose `worker_extension_cls` names the class here imports this module in its own process, and in no other.
"""

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

_right = rejection_sampler.generate_uniform_probs


def _wrong(*arguments: Any, **named: Any) -> torch.Tensor:
    return _right(*arguments, **named) * 0.5


rejection_sampler.generate_uniform_probs = _wrong


class Extension:
    """Adds nothing to the worker."""
