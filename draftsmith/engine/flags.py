"""vLLM's engine arguments as flags of its command line."""

import json
from collections.abc import Mapping
from typing import Any

_AS_JSON = {"allowed-origins", "allowed-methods", "allowed-headers"}
"""Lists that vLLM's command line takes as one JSON string."""


def flag_name(key: str) -> str:
    """An option's name as a flag, without the dashes before it."""
    return key.replace("_", "-").removeprefix("--")


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """The arguments that give these options to vLLM's server; None leaves one out."""
    flags: list[str] = []
    for key, value in options.items():
        name = flag_name(key)
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif name in _AS_JSON:
            flags += [f"--{name}", json.dumps(value)]
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in values)]
    return flags
