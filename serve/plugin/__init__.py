"""A vLLM plugin that serves MLP speculators and mends three things of vLLM 0.32.

**MLP speculators.** vLLM 0.32 has their config but no code to run them. They take EAGLE's place: vLLM's EAGLE proposer gets what an
MLP speculator reads, namely the target's final hidden states, the tokens sampled after them, and the rows to continue from,
corrected for rejected draft tokens. A converted MLP speculator names an architecture of this plugin, which begins with `Eagle` as vLLM
requires, and for that architecture vLLM's proposer classes construct the plugin's proposers, without attention or cache.
Nothing changes for other drafters, and no module of vLLM is imported that vLLM does not import itself.

**Sampling on CPUs.** vLLM 0.32 verifies sampled draft tokens at the wrong temperature, top-k and top-p: the CPU stand-in for the kernel
that repeats a request's settings for each draft token writes into a copy of its output, which keeps whatever was in memory
(`_expand_batch_to_tokens`). Greedy decoding does not use it. Found by `tests/integration/test_lossless.py`.

**Layer id 0 in eager mode on GPUs.** vLLM 0.32 passes wrong states to drafters and to extraction: they are the same tensor as the
first layer's residual stream, to which the fused norm kernel adds in place, layer after layer. The plugin passes a copy. Found
by `tests/v2/test_states.py`.

**Starting on CPUs.** Before its first use on a machine, vLLM looks at a model's class in a new Python process, which imports vLLM for
that: so CUDA stays untouched in the engine's own. Where there is no CUDA the class is looked at in the engine's process, which imports
it anyway.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

ARCHITECTURE = "EagleMLPSpeculatorModel"
"""The same as in `draftsmith/drafters/mlp_speculator.py`, which is not imported here because it imports torch."""

_KNOWN = "0.32."
"""The version whose proposers are replaced. Others may call them differently, and draft tokens would be wrong without an error."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`, called in every process of vLLM, in some more than once."""
    import wrapt
    from vllm import ModelRegistry, __version__

    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    ModelRegistry.register_model(ARCHITECTURE, "draftsmith.serve.plugin.mlp_speculator:MlpSpeculator")
    if __version__.startswith(_KNOWN):
        wrapt.register_post_import_hook(_in_v1, "vllm.v1.spec_decode.eagle")
        wrapt.register_post_import_hook(_in_v2, "vllm.v1.worker.gpu.spec_decode.eagle.speculator")
        wrapt.register_post_import_hook(_in_sampling, "vllm.v1.sample.rejection_sampler")
        wrapt.register_post_import_hook(_in_registry, "vllm.model_executor.models.registry")
        wrapt.register_post_import_hook(_in_models, "vllm.model_executor.models.interfaces")


def require_known_vllm() -> None:
    """
    Raises:
        RuntimeError: this vLLM's proposers were not replaced.
    """
    from vllm import __version__

    if not __version__.startswith(_KNOWN):
        raise RuntimeError(
            f"Draftsmith serves MLP speculators in vLLM {_KNOWN}x, and this is vLLM {__version__}. Install that version, a Draftsmith "
            "that supports this one, or train a drafter of another kind, which vLLM serves by itself."
        )


def _in_v1(module: ModuleType) -> None:
    from draftsmith.serve.plugin.mlp_speculator import proposer_v1

    _divert(module.EagleProposer, proposer_v1(module.EagleProposer))


def _in_v2(module: ModuleType) -> None:
    from draftsmith.serve.plugin.mlp_speculator import proposer_v2

    _divert(module.EagleSpeculator, proposer_v2(module.EagleSpeculator))


def _in_sampling(module: ModuleType) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        module.expand_batch_to_tokens = _expand_batch_to_tokens  # type: ignore[attr-defined]


def _in_registry(module: ModuleType) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        module._run_in_subprocess = lambda inspect: inspect()  # type: ignore[attr-defined]


def _in_models(module: ModuleType) -> None:
    mixin = module.EagleModelMixin
    original = mixin._maybe_add_hidden_state

    def with_copy(self: Any, aux_hidden_states: Any, layer_idx: int, hidden_states: Any, residual: Any) -> Any:
        # With a residual the original passes a sum, which is a tensor of its own.
        if residual is None and layer_idx in self.aux_hidden_state_layers:
            hidden_states = hidden_states.clone()
        return original(self, aux_hidden_states, layer_idx, hidden_states, residual)

    mixin._maybe_add_hidden_state = with_copy
    mixin.keeps_embeddings = True  # extraction's connector checks it


def _expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """`expand_batch_to_tokens` of vLLM's rejection sampler: repeat each value for its request's draft tokens.

    Args:
        x: [requests], any dtype.
        cu_num_tokens: int [requests], cumulative numbers of draft tokens.
        num_tokens: the total.
        replace_from: a value of `x` to replace.
        replace_to: what to replace it with.

    Returns:
        `x`'s dtype [num_tokens]
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


def _divert(original: type, replacement: type) -> None:
    """Have `original(vllm_config, ...)` construct the replacement if the drafter has the plugin's architecture."""

    def new(cls: type, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        architectures = vllm_config.speculative_config.draft_model_config.architectures or []
        return object.__new__(replacement if cls is original and ARCHITECTURE in architectures else cls)

    original.__new__ = new  # type: ignore[assignment, method-assign]
