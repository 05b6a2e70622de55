"""vLLM's plugin: it serves MLP speculators, mends sampling with speculation on CPUs, and the states of layer id 0 on GPUs.

vLLM 0.32 knows the config of MLP speculators and has nothing that runs them. Their place is EAGLE's. What vLLM hands its EAGLE
proposer is what an MLP speculator reads: the target's last states, the tokens sampled after them, and which rows to go on from, corrected for rejected drafts. So the directory of one names an architecture of
ours, beginning with `Eagle` as vLLM wants it, and where vLLM makes a proposer for that architecture it gets ours, which has no
attention and no cache. For every other drafter nothing changes, and of vLLM nothing is imported that it does not import itself.

On CPUs vLLM 0.32 checks sampled guesses at the wrong temperature, top-k and top-p: what stands there for the kernel that repeats
a request's settings for each of its guesses writes into a copy of its output, which stays as memory happened to be (`_mended`).
Greedy decoding does without. Found by `tests/integration/test_lossless.py`.

In eager mode on GPUs vLLM 0.32 hands out wrong states of layer id 0, to drafters and to extraction: they are the very tensor that
the first layer takes for its residual stream, and the kernel that norms there adds to it in place, layer after layer. What is
handed out is now a copy. Found by `tests/v2/test_states.py`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

ARCHITECTURE = "EagleMLPSpeculatorModel"
"""As `draftsmith/drafters/mlp_speculator.py` writes it; not imported from there, for torch is not to be imported here."""

_KNOWN = "0.32."
"""Whose proposers ours replace. Others may call them otherwise, and drafts would be wrong without a word."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: called in every process of vLLM, in some more than once."""
    import wrapt
    from vllm import ModelRegistry, __version__

    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    ModelRegistry.register_model(ARCHITECTURE, "draftsmith.serve.plugin.mlp_speculator:MlpSpeculator")
    if __version__.startswith(_KNOWN):
        wrapt.register_post_import_hook(_in_v1, "vllm.v1.spec_decode.eagle")
        wrapt.register_post_import_hook(_in_v2, "vllm.v1.worker.gpu.spec_decode.eagle.speculator")
        wrapt.register_post_import_hook(_in_sampling, "vllm.v1.sample.rejection_sampler")
        wrapt.register_post_import_hook(_in_models, "vllm.model_executor.models.interfaces")


def require_known_vllm() -> None:
    """Raises RuntimeError on a vLLM whose proposers were not replaced."""
    from vllm import __version__

    if not __version__.startswith(_KNOWN):
        raise RuntimeError(
            f"Draftsmith serves MLP speculators in vLLM {_KNOWN}x, and this is vLLM {__version__}. Install that one, a Draftsmith "
            "that knows this one, or train a drafter of another kind: vLLM serves those itself."
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
        module.expand_batch_to_tokens = _mended  # type: ignore[attr-defined]


def _in_models(module: ModuleType) -> None:
    mixin = module.EagleModelMixin
    theirs = mixin._maybe_add_hidden_state

    def ours(self: Any, aux_hidden_states: Any, layer_idx: int, hidden_states: Any, residual: Any) -> Any:
        # With a residual theirs hands out a sum, which is nobody else's.
        if residual is None and layer_idx in self.aux_hidden_state_layers:
            hidden_states = hidden_states.clone()
        return theirs(self, aux_hidden_states, layer_idx, hidden_states, residual)

    mixin._maybe_add_hidden_state = ours
    mixin.keeps_embeddings = True  # the connector asks for it


def _mended(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """`expand_batch_to_tokens` of vLLM's rejection sampler: each value as often as its request has guesses.

    Args:
        x: [requests], any dtype.
        cu_num_tokens: int [requests], guesses of the requests up to each.
        num_tokens: of all.
        replace_from: a value of `x` for which `replace_to` is to stand.
        replace_to: see there.

    Returns:
        `x`'s dtype [num_tokens]
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


def _divert(theirs: type, ours: type) -> None:
    """Have `theirs(vllm_config, ...)` make one of ours where the drafter is of our architecture."""

    def new(cls: type, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        architectures = vllm_config.speculative_config.draft_model_config.architectures or []
        return object.__new__(ours if cls is theirs and ARCHITECTURE in architectures else cls)

    theirs.__new__ = new  # type: ignore[assignment, method-assign]
