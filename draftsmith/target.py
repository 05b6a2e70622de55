"""The target: a Hugging Face directory whatever it came as, what identifies it, and the weights drafters start from."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError
from draftsmith.files import cache_dir, fetch
from draftsmith.hub import download, is_snapshot
from draftsmith.progress import console
from draftsmith.recipe import Target, digest
from draftsmith.stage import sha256_of

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# ---- preparing ----


def prepare_target(target: Target) -> Path:
    """The target as a local Hugging Face directory: config, safetensors, tokenizer.

    A local directory is used where it lies, a Hub model is downloaded into the Hub's own cache, and a GGUF file is
    dequantized once into the cache, in `target.dtype`.

    Raises:
        UserError: the directory, model, revision or file is not there, or cannot be read.
    """
    if target.gguf is not None:
        gguf = fetch(target.gguf)
        return _prepare_gguf(gguf, sha256=target.gguf.sha256 or sha256_of(gguf), dtype=target.dtype)
    assert target.model is not None  # the recipe's check
    if Path(target.model).is_absolute():  # recipes resolve ./, ~ and / to absolute paths; all else is a Hub id
        path = Path(target.model)
        if not (path / "config.json").is_file():
            what = "has no config.json" if path.is_dir() else "does not exist"
            raise UserError(
                f"The target {path} {what}. `target.model` takes a Hugging Face model directory (config.json, "
                "safetensors, tokenizer), its path relative to the recipe, or a Hub id such as owner/name."
            )
        return path
    return download(
        target.model,
        revision=target.revision,
        allow=["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*", "*.model"],
        ignore=["original/*", "consolidated*"],
    )


def target_name(target: Target) -> str:
    """The target's name for people and for records: Hub id, directory name, or the GGUF file's stem."""
    if target.gguf is not None:
        return Path(target.gguf.file or target.gguf.path or "").stem
    model = target.model or ""
    return Path(model).name if Path(model).is_absolute() else model


def _prepared_gguf(sha256: str, dtype: str) -> Path:
    return cache_dir() / "targets" / f"{sha256[:16]}-{dtype}"


def _prepare_gguf(gguf: Path, *, sha256: str, dtype: str) -> Path:
    """Dequantize a GGUF file into a Hugging Face directory, once; published with one rename."""
    prepared = _prepared_gguf(sha256, dtype)
    if prepared.is_dir():
        return prepared
    if importlib.util.find_spec("gguf") is None:
        raise UserError("Reading a GGUF target needs the package gguf: pip install 'draftsmith[demo]'.")
    console.print(f"preparing {gguf.name} as a Hugging Face directory ({dtype})", highlight=False, soft_wrap=True)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bars last seconds, and off a terminal they are noise
    prepared.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=prepared.parent, prefix=".preparing-"))
    try:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
                dtype=getattr(torch, dtype),
            )
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise UserError(
                f"transformers cannot read {gguf}: {error}. Name a Hugging Face directory instead."
            ) from error
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(prepared)
        except OSError:
            if not prepared.is_dir():  # else another process was quicker, and made the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return prepared


def read_config(target: Target) -> PretrainedConfig:
    """The target's config alone, of the language model: from its directory, the cache, or the Hub (one small file).

    Raises:
        UserError: it cannot be had without preparing the target.
    """
    from transformers import AutoConfig

    where: str | Path = target.model or ""
    if target.gguf is not None:
        where = _prepared_gguf(target.gguf.sha256 or sha256_of(fetch(target.gguf)), target.dtype)
    try:
        if target.gguf is not None and not where.is_dir():  # type: ignore[union-attr]
            raise OSError("the GGUF file has not been prepared here yet")
        return AutoConfig.from_pretrained(where, revision=target.revision).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"The config of the target {target_name(target)} cannot be had here ({type(error).__name__}: {error}). Put a "
            "copy of its config.json beside the recipe and name it: `plan: { target_config: { path: config.json } }`."
        ) from None


# ---- describing ----


@dataclass(frozen=True)
class TargetInfo:
    """What identifies a target, and the sizes that everything made for it depends on."""

    path: Path
    """The Hugging Face directory."""
    name: str
    """For people: Hub id, directory name or GGUF stem."""
    revision: str
    """The Hub commit; elsewhere `weights-` and a hash of samples of the weight files."""
    config_hash: str
    """SHA-256 of config.json's content, without the version of the library that wrote it."""
    tokenizer_hash: str
    """SHA-256 of the tokenizer's vocabulary file."""
    chat_template_hash: str | None
    """SHA-256 of the chat template; None where the tokenizer has none."""
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding, which may be more than the tokenizer has tokens."""
    config: PretrainedConfig
    """The parsed config; of the language model, where the target holds more than one."""


def describe_target(path: Path, target: Target | None = None, *, name: str | None = None) -> TargetInfo:
    """Read what identifies the target in the Hugging Face directory `path`; loads no weights.

    Its name is `name`, or how the recipe's `target` calls it, or that of the directory.

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
    """Tell fine-tunes of one architecture apart without reading tens of gigabytes: size and three samples of a file."""
    found = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - sample_bytes)):
                opened.seek(start)
                found.update(opened.read(sample_bytes))
    return found.hexdigest()[:16]


# ---- layers ----


def default_layer_ids(num_hidden_layers: int) -> tuple[int, ...]:
    """The hidden states to save when a recipe names none: EAGLE-3's usual three and the last, in vLLM's numbering.

    (2, n//2, n-3, n); a target of fewer than seven layers, where these coincide, gets fewer.
    """
    n = num_hidden_layers
    return tuple(sorted({min(2, n), n // 2, max(n - 3, 0), n}))


def check_layer_ids(ids: Sequence[int], num_hidden_layers: int) -> None:
    """Refuse layer ids that the target does not have.

    Raises:
        UserError: an id is outside 0..num_hidden_layers, one is named twice, or there is none.
    """
    valid = (
        f"This target has the ids 0 (the embedding) to {num_hidden_layers} (the last layer's output); "
        "id i is what enters decoder layer i."
    )
    if not ids:
        raise UserError(f"`layer_ids` is empty. {valid}")
    outside = [i for i in ids if not 0 <= i <= num_hidden_layers]
    if outside:
        raise UserError(f"`layer_ids` names {', '.join(map(str, outside))}, outside the model. {valid}")
    twice = sorted({i for i in ids if list(ids).count(i) > 1})
    if twice:
        raise UserError(f"`layer_ids` names {', '.join(map(str, twice))} more than once. {valid}")


# ---- weights ----


_NORMS_LESS_ONE = ("gemma", "gemma2", "gemma3_text", "qwen3_next")
"""Models whose RMSNorm multiplies by 1 + weight."""


@dataclass(frozen=True)
class TargetTensors:
    """The target's weights that drafters share or start from, in the dtype of its files."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size]"""
    lm_head: torch.Tensor
    """[vocab_size, hidden_size]; the same tensor as `embedding` where the target ties them."""
    final_norm_weight: torch.Tensor
    """[hidden_size]; what the normed state is multiplied with. Gemma's files hold it less one; here it is whole."""
    _files: dict[str, Path]
    """Tensor name to the file that holds it."""
    _prefix: str
    """What precedes `embed_tokens`, `layers` and `norm` in the names; `model.` for most."""

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Decoder layer `index`'s tensors, read now, named as inside the layer (`self_attn.q_proj.weight`).

        Raises:
            UserError: the files hold no such layer.
        """
        prefix = f"{self._prefix}layers.{index}."
        names = [name for name in self._files if name.startswith(prefix)]
        if not names:
            raise UserError(f"The target's files hold no tensors named {prefix}*, its decoder layer {index}.")
        return {name.removeprefix(prefix): _read_tensor(self._files, name) for name in names}


def load_target_tensors(path: Path) -> TargetTensors:
    """Read embedding, head and final norm from a Hugging Face directory; the rest stays on disk.

    Raises:
        UserError: the directory has no safetensors, or not the tensors of a causal language model.
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
    if config.get_text_config().model_type in _NORMS_LESS_ONE:
        final_norm_weight = 1 + final_norm_weight.float()
    return TargetTensors(
        embedding=embedding,
        lm_head=embedding if tied else _read_tensor(files, heads[0]),
        final_norm_weight=final_norm_weight,
        _files=files,
        _prefix=prefix,
    )


def _tensor_files(path: Path) -> dict[str, Path]:
    """Every tensor's name and the file that holds it, for single and sharded checkpoints."""
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
