"""Flex attention where there is no GPU."""

import pytest
from torch.nn.attention import flex_attention


def use_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters take what they take on a GPU. Flex attention refuses gradients on CPUs since it has no kernel for them there; its own plain
    arithmetic, which materializes all scores, has them."""
    monkeypatch.setenv("DRAFTSMITH_ATTENTION", "flex")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention_performance"}, raising=False)
