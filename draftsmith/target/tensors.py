"""The target's weights that drafters share or are initialized from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from draftsmith.run.errors import UserError
from draftsmith.target.family import target_facts
from draftsmith.target.pretrained import config_of, language_config
from draftsmith.target.shards import FILES, shards
from draftsmith.target.weight_files import names_in, read_weight, refuse_quantized, scale_of

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of heads; the second is GPT-NeoX's."""


@dataclass(frozen=True)
class TargetTensors:
    """The target's weights that drafters share or are initialized from, in the dtype of its files; 8-bit ones in float32."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size]"""
    lm_head: torch.Tensor
    """[vocab_size, hidden_size], times the target's scale of logits unless that is in the state; the same tensor as `embedding` if the target ties them, by its
    config and its files, and has no scale."""
    final_norm_weight: torch.Tensor
    """[hidden_size]; the factor of the normalized state as vLLM hands it to drafters. Gemma's files hold it minus 1; here the 1 is added."""
    final_norm_bias: torch.Tensor | None = None
    """[hidden_size], of a LayerNorm with a bias."""
    centered_norm: bool = False
    """The final norm is a LayerNorm, which subtracts the mean; else an RMSNorm."""
    logit_soft_cap: float | None = None
    """c, where the target's logits become c * tanh(logits / c)."""
    scaled_embedding: Literal["never", "backend", "always"] = "never"
    """As in `Family`."""

    def shared_embedding(self, *, reads_layers: bool) -> torch.Tensor:
        """The embedding as vLLM gives it to a drafter, float32 [vocab_size, hidden_size].

        Args:
            reads_layers: the drafter reads states of layers, with which vLLM's transformers backend may serve the target.
        """
        table = self.embedding.float()
        scaled = self.scaled_embedding == "always" or (self.scaled_embedding == "backend" and reads_layers)
        return table * table.shape[1] ** 0.5 if scaled else table


def load_target_tensors(path: Path, *, trust_remote_code: bool = False) -> TargetTensors:
    """Read embedding, head and final norm from a Hugging Face directory; other tensors stay on disk, and their shards need not
    be there.

    Args:
        trust_remote_code: whether the target's own code may run, which its config may need.

    Raises:
        UserError: the directory has no weights, or not the tensors of a causal language model of a known family; or they are
            quantized in a way that is not read, missing, damaged or not finite.
    """
    import torch

    config, files, names = _located(path, trust_remote_code)
    facts = target_facts(config)
    table, row = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    embedding = _read_tensor(files, names.embedding, table)
    lm_head = embedding if names.head is None else _read_tensor(files, names.head, table)
    if names.tied and torch.equal(lm_head.to(embedding.dtype), embedding):
        lm_head = embedding
    weight, bias = _read_tensor(files, names.norm, row), f"{names.norm.removesuffix('weight')}bias"
    weight = 1 + weight.float() if facts.family.norm_plus_one else weight
    scale_of_state = facts.logit_scale if facts.family.scaled_state else 1.0
    scale_of_head = facts.logit_scale / scale_of_state
    return TargetTensors(
        embedding=embedding,
        lm_head=lm_head if scale_of_head == 1 else lm_head * scale_of_head,
        final_norm_weight=weight if scale_of_state == 1 else weight * scale_of_state,
        final_norm_bias=_read_tensor(files, bias, row) if bias in files else None,
        centered_norm=facts.family.norm == "layer",
        logit_soft_cap=facts.logit_soft_cap,
        scaled_embedding=facts.family.scaled_embedding,
    )


def require_readable(path: Path, *, trust_remote_code: bool = False) -> None:
    """Check that `load_target_tensors` knows the tensors' names and forms, from the headers of files. Arguments and errors as there."""
    _, files, names = _located(path, trust_remote_code)
    for name in filter(None, (names.embedding, names.norm, names.head)):
        scale_of(_there(files, name), name)


class _Names(NamedTuple):
    embedding: str
    norm: str
    head: str | None
    """None if it is the embedding."""
    tied: bool
    """By the config, which may be wrong where the files have a head."""


def _located(path: Path, trust_remote_code: bool) -> tuple[PretrainedConfig, dict[str, Path], _Names]:
    """The language model's config, the file of each tensor by name, and the names of those that training reads."""
    whole = config_of(path, trust_remote_code=trust_remote_code)
    config = language_config(whole)
    family = target_facts(config).family
    files = _tensor_files(path)
    prefix = _prefix(path, files, family.embedding, f"layers.{config.num_hidden_layers - 1}.")
    norm = f"{prefix}{family.final_norm}.weight"
    if norm not in files:
        raise UserError(f"The target in {path} has no tensor {norm}, its final norm.")
    tied = any(getattr(each, "tie_word_embeddings", False) for each in (whole, config))
    return config, files, _Names(f"{prefix}{family.embedding}.weight", norm, _head(path, files, prefix, tied), tied)


def _prefix(path: Path, files: Mapping[str, Path], embedding: str, last_layer: str) -> str:
    """What the names of the language model's tensors begin with; usually `model.`.

    Layers for multi-token prediction are stored beside it, some with a copy of its embedding.
    """
    ending = f"{embedding}.weight"
    found = [name for name in files if name == ending or name.endswith(f".{ending}")]
    prefixes = [name.removesuffix(ending) for name in found]
    prefixes = [prefix for prefix in prefixes if any(name.startswith(prefix + last_layer) for name in files)]
    if len(prefixes) == 1:
        return prefixes[0]
    if not found:
        refuse_quantized(files, embedding)
    raise UserError(
        f"The target in {path} must have one tensor named *{ending} with a layer *{last_layer}* beside it; found: "
        f"{', '.join(found) or 'none'}. Save it with transformers' save_pretrained, or get it again."
    )


def _head(path: Path, files: Mapping[str, Path], prefix: str, tied: bool) -> str | None:
    """The head's name; None if it is the embedding.

    Some configs say by default or by mistake that it is, beside files with another one: transformers and vLLM use that.
    """
    heads = [name for name in files if name.endswith(_HEADS) and ".layers." not in name]
    if tied:
        # A model beside the language model, such as one for multi-token prediction, may have a head of its own.
        heads = [name for name in heads if prefix.startswith(name.removesuffix(".weight").rpartition(".")[0])]
        if len(heads) != 1:
            return None
    if not heads:
        refuse_quantized(files, "lm_head")
    if len(heads) != 1:
        found = ", ".join(heads) or "none"
        raise UserError(
            f"The target in {path} does not tie its head to its embedding, and must have one tensor lm_head.weight; found: {found}."
        )
    bias = heads[0].removesuffix("weight") + "bias"
    if bias in files:
        raise UserError(f"The head of the target in {path} has a bias ({bias}), which drafters' heads cannot express.")
    return heads[0]


def _tensor_files(path: Path) -> dict[str, Path]:
    """The file of each tensor, by name, for single and sharded checkpoints."""
    for whole in FILES:
        if (places := shards(path, whole)) is not None:
            return {name: path / file for name, file in places.items()}
        if (path / whole).is_file():
            return dict.fromkeys(names_in(path / whole), path / whole)
    raise UserError(
        f"The target in {path} has no {' and no '.join(FILES)}. Save it with transformers' save_pretrained."
    )


def _there(files: dict[str, Path], name: str) -> dict[str, Path]:
    """The files, if that of this tensor is there."""
    file = files[name]
    if not file.is_file():
        raise UserError(
            f"The target in {file.parent} is incomplete: {file.name}, the shard with {name}, is missing. Download or copy it."
        )
    return files


def _read_tensor(files: dict[str, Path], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    file, tensor = files[name], read_weight(_there(files, name), name)
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{name} in {file} is {list(tensor.shape)}, and the target's config says {list(shape)}. The files do not belong "
            "together: download or save the model again."
        )
    if not torch.stack(tensor.aminmax()).isfinite().all():  # a NaN is both, and nothing is copied
        raise UserError(
            f"{name} in {file} has values that are not finite. The file is damaged, or its training has diverged: download "
            "the model again, or use another."
        )
    return tensor
