"""A target's identity and sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config.loading import digest
from draftsmith.config.recipe import TargetConfig
from draftsmith.run.atomic_io import read_json, sha256_of
from draftsmith.run.errors import UserError
from draftsmith.target.family import TargetFacts, size_of, target_facts
from draftsmith.target.hub import is_snapshot
from draftsmith.target.prepare import target_name
from draftsmith.target.pretrained import config_of, language_config

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
    trust_remote_code: bool = False
    """Whether its own Python code may run."""

    @cached_property
    def facts(self) -> TargetFacts:
        """What training takes from the config.

        Raises:
            UserError: the target's family is not known, or its config makes no sense.
        """
        return target_facts(self.config)


def describe_target(path: Path, target: TargetConfig | None = None, *, name: str | None = None) -> TargetInfo:
    """Describe the target in the Hugging Face directory `path`, without loading weights.

    Its name is `name`, or the recipe's name for `target`, or the directory's.

    Raises:
        UserError: the config or the tokenizer is missing or unreadable, or it is not a causal language model, or the target's own
            code would have to run to read it.
    """
    trusted = target is not None and target.trust_remote_code
    raw = read_json(path / "config.json")
    config = language_config(config_of(path, trust_remote_code=trusted))
    raw.pop("transformers_version", None)
    return TargetInfo(
        path=path,
        name=name or (target_name(target) if target else path.name),
        revision=path.name if is_snapshot(path) else f"weights-{_weights_sample(path, with_code=trusted)}",
        config_hash=digest(raw),
        tokenizer_hash=_tokenizer_hash(path),
        chat_template_hash=_chat_template_hash(path),
        num_hidden_layers=size_of(config, "num_hidden_layers"),
        hidden_size=size_of(config, "hidden_size"),
        vocab_size=size_of(config, "vocab_size"),
        config=config,
        trust_remote_code=trusted,
    )


def _tokenizer_hash(path: Path) -> str:
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json"):
        if (path / name).is_file():
            return sha256_of(path / name)
    raise UserError(f"The target in {path} has no tokenizer (tokenizer.json). Save its tokenizer beside the model.")


def _chat_template_hash(path: Path) -> str | None:
    template: Any = None
    if (path / "chat_template.jinja").is_file():
        try:
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
        except ValueError:
            raise UserError(
                f"{path / 'chat_template.jinja'} is not text in UTF-8. Get the target's tokenizer again."
            ) from None
    elif (path / "tokenizer_config.json").is_file():
        template = read_json(path / "tokenizer_config.json").get("chat_template")
    return None if template is None else digest(template)


def _weights_sample(path: Path, *, with_code: bool, sample_bytes: int = 1 << 20) -> str:
    """Tells fine-tunes of an architecture apart without reading all weights: the size of each file and three samples of it.

    Args:
        with_code: also the target's own code, which then decides what it computes.
    """
    found = hashlib.sha256()
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    files += sorted(path.glob("*.py")) if with_code else []
    for file in filter(Path.is_file, files):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - sample_bytes)):
                opened.seek(start)
                found.update(opened.read(sample_bytes))
    return found.hexdigest()[:16]
