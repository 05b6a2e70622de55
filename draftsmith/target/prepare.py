"""The target as a local Hugging Face directory, from a directory, the Hub or a GGUF file."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.config.recipe import TargetConfig
from draftsmith.run.atomic_io import sha256_of
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.target.downloads import cache_dir, fetch
from draftsmith.target.hub import download

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def prepare_target(target: TargetConfig) -> Path:
    """The target as a local Hugging Face directory: config, safetensors, tokenizer.

    A local directory is used in place, a Hub model is downloaded into the Hub's own cache, and a GGUF file is dequantized
    once into Draftsmith's cache, in `target.dtype`.

    Raises:
        UserError: the directory, model, revision or file does not exist or cannot be read.
    """
    if target.gguf is not None:
        gguf = fetch(target.gguf)
        return _prepare_gguf(gguf, sha256=target.gguf.sha256 or sha256_of(gguf), dtype=target.dtype)
    assert target.model is not None  # the recipe's check
    if Path(target.model).is_absolute():  # recipes resolve ./, ~ and / to absolute paths; anything else is a Hub id
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


def target_name(target: TargetConfig) -> str:
    """The target's name for people and for records: Hub id, directory name, or stem of the GGUF file."""
    if target.gguf is not None:
        return Path(target.gguf.file or target.gguf.path or "").stem
    model = target.model or ""
    return Path(model).name if Path(model).is_absolute() else model


def _prepared_gguf(sha256: str, dtype: str) -> Path:
    return cache_dir() / "targets" / f"{sha256[:16]}-{dtype}"


def _prepare_gguf(gguf: Path, *, sha256: str, dtype: str) -> Path:
    """Dequantize a GGUF file into a Hugging Face directory, once and atomically."""
    prepared = _prepared_gguf(sha256, dtype)
    if prepared.is_dir():
        return prepared
    if importlib.util.find_spec("gguf") is None:
        raise UserError("Reading a GGUF target needs the package gguf: pip install 'draftsmith[demo]'.")
    console.print(f"preparing {gguf.name} as a Hugging Face directory ({dtype})", highlight=False, soft_wrap=True)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bars last seconds, and are noise in logs
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
                f"transformers cannot read {gguf}: {error}. Use a Hugging Face directory instead."
            ) from error
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(prepared)
        except OSError:
            if not prepared.is_dir():  # otherwise another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return prepared


def read_config(target: TargetConfig) -> PretrainedConfig:
    """Only the target's config, of the language model: from its directory, the cache, or the Hub (one small file).

    Raises:
        UserError: it is not available without preparing the target.
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
            f"The config of the target {target_name(target)} is not available here ({type(error).__name__}: {error}). Put a "
            "copy of its config.json beside the recipe and name it: `plan: { target_config: { path: config.json } }`."
        ) from None
