"""The target's weights that drafters share or are initialized from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    import torch

_NORMS_MINUS_ONE = ("gemma", "gemma2", "gemma3_text", "qwen3_next")
"""Models whose RMSNorm multiplies by 1 + weight."""


@dataclass(frozen=True)
class TargetTensors:
    """The target's weights that drafters share or are initialized from, in the dtype of its files."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size]"""
    lm_head: torch.Tensor
    """[vocab_size, hidden_size]; the same tensor as `embedding` if the target ties them."""
    final_norm_weight: torch.Tensor
    """[hidden_size]; the factor of the normalized state. Gemma's files hold it minus 1; here the 1 is added."""
    _files: dict[str, Path]
    """The file of each tensor, by name."""
    _prefix: str
    """Precedes `embed_tokens`, `layers` and `norm` in tensor names; usually `model.`."""

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Read decoder layer `index`; tensors are named as inside the layer (`self_attn.q_proj.weight`).

        Raises:
            UserError: there is no such layer.
        """
        prefix = f"{self._prefix}layers.{index}."
        names = [name for name in self._files if name.startswith(prefix)]
        if not names:
            raise UserError(f"The target's files hold no tensors named {prefix}*, its decoder layer {index}.")
        return {name.removeprefix(prefix): _read_tensor(self._files, name) for name in names}


def load_target_tensors(path: Path) -> TargetTensors:
    """Read embedding, head and final norm from a Hugging Face directory; other tensors stay on disk.

    Raises:
        UserError: the directory has no safetensors files, or not the tensors of a causal language model.
    """
    from transformers import AutoConfig

    files = _tensor_files(path)
    embeddings = [name for name in files if name.endswith("embed_tokens.weight")]
    if len(embeddings) != 1:
        found = ", ".join(embeddings) or "none"
        raise UserError(f"The target in {path} must have one tensor named *embed_tokens.weight; found: {found}.")
    prefix = embeddings[0].removesuffix("embed_tokens.weight")
    if f"{prefix}norm.weight" not in files:
        raise UserError(f"The target in {path} has no tensor {prefix}norm.weight, its final norm.")

    config = AutoConfig.from_pretrained(path)
    tied = config.tie_word_embeddings or config.get_text_config().tie_word_embeddings
    heads = [name for name in files if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
    if not tied and len(heads) != 1:
        raise UserError(
            f"The target in {path} does not tie its head to its embedding, and has no tensor lm_head.weight."
        )

    embedding = _read_tensor(files, embeddings[0])
    final_norm_weight = _read_tensor(files, f"{prefix}norm.weight")
    if config.get_text_config().model_type in _NORMS_MINUS_ONE:
        final_norm_weight = 1 + final_norm_weight.float()
    return TargetTensors(
        embedding=embedding,
        lm_head=embedding if tied else _read_tensor(files, heads[0]),
        final_norm_weight=final_norm_weight,
        _files=files,
        _prefix=prefix,
    )


def _tensor_files(path: Path) -> dict[str, Path]:
    """The file of each tensor, by name, for single and sharded checkpoints."""
    from safetensors import SafetensorError, safe_open

    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        files = {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            raise UserError(f"The target in {path} is incomplete: {', '.join(missing)} of its shards are missing.")
        return files
    if not single.is_file():
        raise UserError(f"The target in {path} has no model.safetensors. Save it with transformers' save_pretrained.")
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except SafetensorError as error:
        raise UserError(f"{single} is damaged: {error}. Download or save the model again.") from None


def _read_tensor(files: dict[str, Path], name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(files[name], framework="pt") as opened:
        return opened.get_tensor(name)
