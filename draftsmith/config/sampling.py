"""How answers are sampled: the parameters of vLLM's that change what speculation accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, as vLLM applies them: the temperature first, then top-k, then top-p."""

    temperature: float = 0.0
    """0 decodes greedily; the others then change nothing."""
    top_p: float = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this."""
    top_k: int | None = None
    """Sample from this many likeliest tokens; None for all."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sampling:
        """From a mapping that may hold other keys too, as a store's record does. What is greedy is equal to any other greedy."""
        temperature = float(values.get("temperature") or 0.0)
        return cls(temperature, float(values.get("top_p") or 1.0), values.get("top_k")) if temperature else cls()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def arguments(self) -> dict[str, Any]:
        """Of vLLM's `SamplingParams`."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k or 0}

    def record(self) -> dict[str, Any]:
        """For a JSON file; `of` reads it."""
        return asdict(self)

    def __str__(self) -> str:
        if self.greedy:
            return "greedy"
        top_p = "" if self.top_p == 1 else f", top-p {self.top_p:g}"
        return f"temperature {self.temperature:g}{top_p}{'' if self.top_k is None else f', top-k {self.top_k}'}"


GREEDY = Sampling()
