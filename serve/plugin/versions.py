"""The version of vLLM whose proposers the plugin replaces."""

KNOWN = "0.32."
"""Others may call their proposers differently, and draft tokens would be wrong without an error."""


def require_known_vllm() -> None:
    """Raises RuntimeError: this vLLM's proposers were not replaced."""
    from vllm import __version__

    if not __version__.startswith(KNOWN):
        raise RuntimeError(
            f"Draftsmith serves MLP speculators in vLLM {KNOWN}x, and this is vLLM {__version__}. Install that version, a Draftsmith "
            "that supports this one, or train a drafter of another kind, which vLLM serves by itself."
        )
