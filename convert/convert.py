"""The convert stage, checkpoint to `vllm/`; and any published drafter to any format."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.convert.contents import UNKNOWN_TARGET, DraftCheckpoint, read_own, write_own
from draftsmith.convert.formats import FORMATS
from draftsmith.convert.formats.base import Format
from draftsmith.convert.model_card import render
from draftsmith.convert.quantize import SCHEMES, scheme_of
from draftsmith.convert.verify import compare, drafter_of
from draftsmith.convert.vocabulary import with_vocabulary
from draftsmith.convert.weights import open_weights, read_json
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import RECORD, WEIGHTS
from draftsmith.drafters.vocabulary import choose_draft_vocabulary
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.store.reader import Store
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import load_target_tensors

NATIVE = "draftsmith"
"""The name of the trainer's own checkpoint among the formats."""


def run_convert(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Make `run_dir/vllm` from `run_dir/checkpoint`; nothing happens when it is finished for the same inputs.

    Raises:
        UserError: there is no finished checkpoint.
    """
    started = time.time()
    source, directory = run_dir / "checkpoint", run_dir / "vllm"
    if stage.read(source) is None:
        raise UserError(f"There is no finished checkpoint at {source}. Run `draftsmith train` with this recipe first.")
    dtype = recipe.convert.dtype or recipe.target.dtype
    inputs = converted_from(source, dtype, recipe.convert.quantize)
    if stage.finished(directory, inputs):
        console.print(f"convert: {directory} is up to date")
        return stage.read(directory)["figures"]  # type: ignore[index]

    contents = read_own(source)
    stage.claim(directory, fresh=True)
    quantized = recipe.convert.quantize
    size = FORMATS["vllm"].write(contents, directory, dtype=dtype, quantize=quantized)
    stage.write_bytes(directory / "README.md", render(contents, recipe.target, quantized=quantized).encode())
    figures = {"parameters": sum(weight.count for weight in contents.weights.values()), "bytes": size}
    sections = recipe.model_dump(mode="json", include={"convert"})
    stage.finish(directory, stage="convert", inputs=inputs, recipe=sections, figures=figures, started=started)
    console.print(f"convert: {directory} holds {figures['parameters'] / 1e6:.1f} M parameters for vLLM")
    return figures


def converted_from(checkpoint: Path, dtype: str, quantized: str | None) -> str:
    """Digest of what a conversion depends on: `inputs` of its record.

    Args:
        checkpoint: the directory.
        dtype: of the tensors for vLLM.
        quantized: one of `quantize.SCHEMES`, or None.
    """
    sources = [stage.sha256_of(checkpoint / WEIGHTS), stage.sha256_of(checkpoint / RECORD), dtype]
    return digest(sources + ([quantized] if quantized else []))


# ---- any format ----


@dataclass(frozen=True)
class Found:
    """What a directory was recognized as."""

    format: str
    """A name of `FORMATS`, or `NATIVE`."""
    kind: str
    reason: str


def recognize(directory: Path, named: str | None = None) -> Found:
    """Tell a checkpoint's format by what is in it.

    Args:
        directory: with a checkpoint.
        named: the format that the user says it has.

    Raises:
        UserError: it is none that is known, or not the named one.
    """
    if (directory / RECORD).is_file() and named in (None, NATIVE):
        return Found(NATIVE, str(read_json(directory / RECORD).get("kind")), f"it has a {RECORD}")
    if named == NATIVE:
        raise UserError(f"{directory} is no checkpoint of the trainer: it has no {RECORD}.")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} is no checkpoint of a drafter: it has neither {RECORD} nor config.json.")
    record, names = read_json(directory / "config.json"), open_weights(directory)
    chosen: list[Format] = [FORMATS[named]] if named else list(FORMATS.values())
    for each in chosen:
        if found := each.recognize(record, names.keys()):
            return Found(each.name, *found)
        if named and len(each.layouts) == 1:
            return Found(named, next(iter(each.layouts)), "you said so")
    raise UserError(
        f"The checkpoint in {directory} is of no format that is known here"
        f"{f', and not of the format {named}' if named else ''}: its architecture is {record.get('architectures')}, and its "
        f"first tensors are {', '.join(sorted(names)[:4])}. `draftsmith convert --list` prints the formats; --from names one."
    )


def read(directory: Path, found: Found, target: TargetInfo | None = None) -> DraftCheckpoint:
    """The checkpoint in `directory`.

    Args:
        found: by `recognize`.
        target: what the drafter was made for, for formats that do not say.

    Raises:
        UserError: it is damaged, or does not say all that it must.
    """
    try:
        if found.format == NATIVE:
            return read_own(directory)
        whose: dict[str, str | None] = UNKNOWN_TARGET
        known: dict[str, Any] = {}
        if target is not None:
            whose = {"name": target.name, "revision": target.revision, "config_hash": target.config_hash}
            known = drafter_class(found.kind).config_defaults(target)
        return FORMATS[found.format].read(directory, found.kind, target=whose, known=known)
    except UserError as error:
        raise UserError(f"{directory}, read as {found.format} ({found.kind}): {error}") from None


def convert_checkpoint(
    source: Path,
    out: Path,
    *,
    to: str,
    named: str | None = None,
    target: TargetInfo | None = None,
    dtype: str | None = None,
    vocabulary: int | None = None,
    store: Path | None = None,
    quantize: str | None = None,
    verify: bool = False,
    served: Callable[[Path, Drafter], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write the drafter in `source` as the format `to` into the new directory `out`, which appears when it is whole.

    Args:
        named: the format of `source`, where it is not to be told by its content.
        target: what the drafter was made for, for formats that do not say.
        dtype: torch's name of the floating-point type; None for that of the source.
        vocabulary: cut or grow the draft vocabulary to so many tokens, the most frequent of the answers in `store`.
        store: a finished store; where `vocabulary` is given.
        quantize: linear layers' weights in 8 bits, one of `quantize.SCHEMES`.
        verify: read back what was written, and compare its logits with the source's before it appears.
        served: with `verify`: compares what an engine proposes from the directory with what the drafter does, and returns
            figures; where `target` is given.

    Raises:
        UserError: `source` cannot be read, `to` cannot hold it, or there is something at `out`.
        DraftsmithError: a comparison failed.
    """
    started = time.time()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already. Move it away, or name another folder with --out.")
    found = recognize(source, named)
    console.print(
        f"convert: {source} is a drafter of the kind {found.kind} in the format {found.format}: {found.reason}"
    )
    if quantize is not None and to == NATIVE:
        raise UserError("The trainer's checkpoint holds weights in floating point. --quantize goes with --to vllm.")
    original = contents = read(source, found, target)
    if found.format != NATIVE and (was := scheme_of(read_json(source / "config.json"))) is not None:
        console.print(f"convert: its weights are quantized ({was}); they are read as floating-point numbers")
    tensors = None
    if target is not None and (verify or vocabulary is not None):  # else its config is all that is read of it
        tensors = load_target_tensors(target.path)
    if vocabulary is not None:
        assert store is not None
        counts = Store(store).token_counts(contents.config["vocab_size"])
        ids = choose_draft_vocabulary(counts, vocabulary)
        contents = with_vocabulary(contents, ids, None if tensors is None else tensors.lm_head)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        if to == NATIVE:
            write_own(contents.to(dtype), temporary)
        else:
            FORMATS[to].write(contents, temporary, dtype=dtype, quantize=quantize)
            stage.write_bytes(temporary / "README.md", render(contents, quantized=quantize).encode())
        verified: dict[str, Any] | None = None
        if verify:
            result = read(temporary, Found(to, found.kind, ""), target)
            verified = {**compare(original, result, tensors, rounded=quantize is not None)}
            console.print(
                f"verified: on the same inputs logits are apart by {verified['relative_difference']:.2g} of their size; "
                f"{verified['same_first_choice']:.0%} of first choices are the same"
            )
            if served is not None and tensors is not None:
                verified["served"] = served(temporary, drafter_of(result, tensors))
        (temporary / stage.OWNER).touch()
        figures: dict[str, Any] = {
            "from": found.format, "to": to, "kind": found.kind, "quantized": quantize,
            "parameters": sum(weight.count for weight in contents.weights.values()),
            "bytes": sum(file.stat().st_size for file in temporary.iterdir()), "verified": verified,
        }  # fmt: skip
        inputs = digest([str(source.resolve()), figures, dtype, vocabulary, str(store), quantize])
        stage.finish(temporary, stage="convert", inputs=inputs, recipe={}, figures=figures, started=started)
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    in_bits = f", {SCHEMES[quantize].title}" if quantize else ""
    console.print(
        f"convert: {out} holds {figures['parameters'] / 1e6:.1f} M parameters in the format {to}{in_bits}, "
        f"{figures['bytes'] / 1e6:.1f} MB"
    )
    return figures


def table_of_formats() -> list[tuple[str, str, list[str], list[str]]]:
    """Each format: its name, what it is, the kinds of drafter it holds, and the formats that can hold all or some of them."""
    holds = {NATIVE: sorted({kind for each in FORMATS.values() for kind in each.layouts})}
    holds |= {name: sorted(each.layouts) for name, each in FORMATS.items()}
    titles = {NATIVE: "the trainer's own checkpoint"} | {name: each.title for name, each in FORMATS.items()}
    return [
        (name, titles[name], kinds, [other for other in holds if other != name and set(holds[other]) & set(kinds)])
        for name, kinds in holds.items()
    ]
