"""The target as a local Hugging Face directory, from a directory, the Hub or a GGUF file."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from draftsmith.config.recipe import TargetConfig
from draftsmith.config.sources import FileSource
from draftsmith.run.atomic_io import read_json, sha256_of
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.target.downloads import cache_dir, fetch
from draftsmith.target.hub import download
from draftsmith.target.pretrained import config_of, language_config
from draftsmith.target.shards import FILES, require_all_shards, shared_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Weights = Literal["all", "shared", "none"]
"""Which of the target's weights a stage reads: engines all, training the files of those that drafters share with the target."""
_WITHOUT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "tokenizer*", "*.model")
"""Config, tokenizer, and the index of the weights."""


def prepare_target(target: TargetConfig, *, weights: Weights = "all") -> Path:
    """The target as a local Hugging Face directory: config, tokenizer, and weights (PyTorch's files only if there are no safetensors).

    A local directory is used in place, a Hub model is downloaded into the Hub's own cache as far as it is not there, and a GGUF
    file is dequantized once into Draftsmith's cache, in `target.dtype`.

    Args:
        weights: what to download of a Hub model's weights; other files may be there, and need not.

    Raises:
        UserError: the directory, model, revision or file does not exist or cannot be read; of all weights, a shard is missing.
    """
    if target.gguf is not None:
        gguf = _fetch_gguf(target.gguf)
        return _prepare_gguf(gguf, sha256=target.gguf.sha256 or sha256_of(gguf), dtype=target.dtype)
    assert target.model is not None  # the recipe's check
    if Path(target.model).is_absolute():  # recipes resolve ./, ~ and / to absolute paths; anything else is a Hub id
        path = Path(target.model)
        _require_config(path)
    else:
        path = _from_hub(target, weights)
    if weights == "all":
        require_all_shards(path)
    return path


def _require_config(path: Path) -> None:
    """
    Raises:
        UserError: the target's directory does not exist, or has no config.json.
    """
    if (path / "config.json").is_file():
        return
    if path.is_file():
        raise UserError(f"The target {path} is a file. A GGUF file is `target: {{ gguf: {{ path: {path.name} }} }}`.")
    what = "has no config.json" if path.is_dir() else "does not exist"
    raise UserError(
        f"The target {path} {what}. `target.model` takes a Hugging Face model directory (config.json, "
        "safetensors, tokenizer), its path relative to the recipe, or a Hub id such as owner/name."
    )


def _fetch_gguf(source: FileSource) -> Path:
    """
    Raises:
        UserError: as `fetch`, or it is no GGUF file.
    """
    path = fetch(source)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(
                f"{path} is not a GGUF file, which begins with these four letters. Download it again, or name another in `target.gguf`."
            )
    return path


def _from_hub(target: TargetConfig, weights: Weights) -> Path:
    """The commit's folder in the Hub's cache, with at least the files that are asked for."""
    assert target.model is not None
    code = ("*.py",) if target.trust_remote_code else ()
    path = download(target.model, revision=target.revision, allow=[*_WITHOUT_WEIGHTS, *code], ignore=["original/*"])
    for whole in FILES if weights != "none" else ():  # PyTorch's files only if there are no safetensors
        every = "*.safetensors" if whole.endswith(".safetensors") else "pytorch_model*.bin"
        wanted = [every] if weights == "all" else shared_files(path, whole)
        # Of the same commit, whatever the branch is by now.
        download(target.model, revision=path.name, allow=wanted, ignore=["original/*", "consolidated*"])
        if any(path.glob(every)):
            break
    return path


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
        raise UserError(
            "Reading a GGUF target needs the package gguf: `pip install -e '.[demo]'` in Draftsmith's folder."
        )
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
        temporary.chmod(0o755)  # others may share the cache, and mkdtemp's is its owner's alone
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
    where: str | Path = target.model or ""
    if target.gguf is not None:
        where = _prepared_gguf(target.gguf.sha256 or sha256_of(_fetch_gguf(target.gguf)), target.dtype)
    try:
        if isinstance(where, Path) and not where.is_dir():
            raise UserError(
                "The GGUF file has not been prepared here yet: run `draftsmith extract` once, which begins with that."
            )
        if Path(where).is_absolute():
            _require_config(Path(where))
            read_json(Path(where) / "config.json")  # says of another file what it is; transformers does not
        return language_config(config_of(where, revision=target.revision, trust_remote_code=target.trust_remote_code))
    except UserError as error:
        raise UserError(
            f"The config of the target {target_name(target)} is not available here: {str(error).rstrip('.')}. Or put a copy of the model's "
            "config.json beside the recipe and name it: `plan: { target_config: { path: config.json } }`."
        ) from None
