"""vLLM's plugin that serves MLP speculators: vLLM 0.32 knows their config and has nothing that runs them.

Their place is EAGLE's. What vLLM hands its EAGLE proposer is what an MLP speculator reads: the target's last states, the tokens
sampled after them, and which rows to go on from, corrected for rejected drafts. So the directory of one names an architecture of
ours, beginning with `Eagle` as vLLM wants it, and where vLLM makes a proposer for that architecture it gets ours, which has no
attention and no cache. For every other drafter nothing changes, and of vLLM nothing is imported that it does not import itself.
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
    ModelRegistry.register_model(ARCHITECTURE, "draftsmith.serve.mlp_speculator:MlpSpeculator")
    if __version__.startswith(_KNOWN):
        wrapt.register_post_import_hook(_in_v1, "vllm.v1.spec_decode.eagle")
        wrapt.register_post_import_hook(_in_v2, "vllm.v1.worker.gpu.spec_decode.eagle.speculator")


def require_known_vllm() -> None:
    """Raises RuntimeError on a vLLM whose proposers were not replaced."""
    from vllm import __version__

    if not __version__.startswith(_KNOWN):
        raise RuntimeError(
            f"Draftsmith serves MLP speculators in vLLM {_KNOWN}x, and this is vLLM {__version__}. Install that one, a Draftsmith "
            "that knows this one, or train a drafter of another kind: vLLM serves those itself."
        )


def _in_v1(module: ModuleType) -> None:
    from draftsmith.serve.mlp_speculator import proposer_v1

    _divert(module.EagleProposer, proposer_v1(module.EagleProposer))


def _in_v2(module: ModuleType) -> None:
    from draftsmith.serve.mlp_speculator import proposer_v2

    _divert(module.EagleSpeculator, proposer_v2(module.EagleSpeculator))


def _divert(theirs: type, ours: type) -> None:
    """Have `theirs(vllm_config, ...)` make one of ours where the drafter is of our architecture."""

    def new(cls: type, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        architectures = vllm_config.speculative_config.draft_model_config.architectures or []
        return object.__new__(ours if cls is theirs and ARCHITECTURE in architectures else cls)

    theirs.__new__ = new  # type: ignore[assignment, method-assign]
