"""A target's identity and sizes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config.loading import digest
from draftsmith.config.recipe import TargetConfig
from draftsmith.run.atomic_io import sha256_of
from draftsmith.run.errors import UserError
from draftsmith.target.hub import is_snapshot
from draftsmith.target.prepare import target_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class TargetInfo:
    """A target's identity, and the sizes that drafters and stores depend on."""

    path: Path
    """The Hugging Face directory."""
    name: str
    """For people: Hub id, directory name, or stem of the GGUF file."""
    revision: str
    """The Hub commit; for other directories `weights-` and a hash of samples of the weight files."""
    config_hash: str
    """SHA-256 of config.json's content, without `transformers_version`."""
    tokenizer_hash: str
    """SHA-256 of the tokenizer's vocabulary file."""
    chat_template_hash: str | None
    """SHA-256 of the chat template; None if there is none."""
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding; there may be more than the tokenizer has tokens."""
    config: PretrainedConfig
    """The parsed config; the language model's if the target holds several models."""


def describe_target(path: Path, target: TargetConfig | None = None, *, name: str | None = None) -> TargetInfo:
    """Describe the target in the Hugging Face directory `path`, without loading weights.

    Its name is `name`, or the recipe's name for `target`, or the directory's.

    Raises:
        UserError: the config or the tokenizer is missing or unreadable.
    """
    from transformers import AutoConfig

    try:
        raw = json.loads((path / "config.json").read_text())
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"Cannot read the target's config in {path}: {error}.") from error
    raw.pop("transformers_version", None)
    return TargetInfo(
        path=path,
        name=name or (target_name(target) if target else path.name),
        revision=path.name if is_snapshot(path) else f"weights-{_weights_sample(path)}",
        config_hash=digest(raw),
        tokenizer_hash=_tokenizer_hash(path),
        chat_template_hash=_chat_template_hash(path),
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        config=config,
    )


def _tokenizer_hash(path: Path) -> str:
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json"):
        if (path / name).is_file():
            return sha256_of(path / name)
    raise UserError(f"The target in {path} has no tokenizer (tokenizer.json). Save its tokenizer beside the model.")


def _chat_template_hash(path: Path) -> str | None:
    template: Any = None
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text()
    elif (path / "tokenizer_config.json").is_file():
        template = json.loads((path / "tokenizer_config.json").read_text()).get("chat_template")
    return None if template is None else digest(template)


def _weights_sample(path: Path, sample_bytes: int = 1 << 20) -> str:
    """Tells fine-tunes of an architecture apart without reading all weights: the size of each file and three samples of it."""
    found = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - sample_bytes)):
                opened.seek(start)
                found.update(opened.read(sample_bytes))
    return found.hexdigest()[:16]
