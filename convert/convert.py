"""The convert stage, checkpoint to `vllm/`; and any drafter's checkpoint to any format."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.convert.fc_bias import folded, needs_folding
from draftsmith.convert.formats import FORMATS
from draftsmith.convert.formats.base import Format, SharedTensors
from draftsmith.convert.model_card import render
from draftsmith.convert.quantize import SCHEMES, scheme_of
from draftsmith.convert.verify import compare
from draftsmith.convert.vocabulary import with_vocabulary
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import (
    EMBEDDING,
    RECORD,
    TREES,
    UNKNOWN_TARGET,
    WEIGHTS,
    Checkpoint,
    checkpoint_sha256,
)
from draftsmith.drafters.decoder import DecoderDrafter
from draftsmith.drafters.vocabulary import choose_draft_vocabulary
from draftsmith.engine.speculation import drafter_files
from draftsmith.run import stage
from draftsmith.run.atomic_io import new_folder, read_json, require_new, sha256_of, write_bytes
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.run.stage import StageRun
from draftsmith.run.weights import open_weights
from draftsmith.store.reader import Store
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import load_target_tensors

NATIVE = "draftsmith"
"""The trainer's own checkpoint, as a format's name."""


def run_convert(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Make `run_dir/vllm` from `run_dir/checkpoint`, unless it is finished for the same inputs.
    Returns the figures of `stage.json`. Raises UserError: there is no finished checkpoint."""
    run = StageRun("convert", run_dir / "vllm")
    source, quantized = run_dir / "checkpoint", recipe.convert.quantize
    if stage.read(source) is None:
        raise UserError(f"There is no finished checkpoint at {source}. Run `draftsmith train` with this recipe first.")
    dtype = recipe.convert.dtype or recipe.target.dtype
    inputs = converted_from(source, dtype, quantized)
    if (finished := run.finished(inputs, check_files=True)) is not None:
        return finished

    checkpoint = Checkpoint.load(source).check()
    run.claim(fresh=True)
    size = FORMATS["vllm"].write(checkpoint, run.directory, dtype=dtype, quantize=quantized)
    write_bytes(run.directory / "README.md", render(checkpoint, recipe.target, quantized=quantized).encode())
    parameters = sum(weight.count for weight in checkpoint.weights.values())
    figures = {
        "parameters": parameters,
        "bytes": size,
        "checkpoint_sha256": checkpoint_sha256(source),
    }
    console.print(f"convert: {run.directory} holds {parameters / 1e6:.1f} M parameters for vLLM")
    return run.finish(
        inputs,
        figures,
        recipe=recipe.model_dump(mode="json", include={"convert"}),
        files=drafter_files(run.directory),  # not the card, in which evaluation writes
    )


def converted_from(checkpoint: Path, dtype: str, quantized: str | None) -> str:
    """Digest of all that a conversion depends on: `inputs` in its `stage.json`."""
    sources = [*checkpoint_sha256(checkpoint).values(), dtype]
    return digest(sources + ([quantized] if quantized else []))


# ---- any format ----


@dataclass(frozen=True)
class Found:
    """The format that was recognized in a directory."""

    format: str
    """A name of `FORMATS`, or `NATIVE`."""
    kind: str
    reason: str


def recognize(directory: Path, named: str | None = None) -> Found:
    """Detect the format of the checkpoint in `directory` from its content.
    Raises UserError: the format is unknown, or not the one `named` by the user."""
    if (directory / RECORD).is_file() and named in (None, NATIVE):
        return Found(NATIVE, str(read_json(directory / RECORD).get("kind")), f"it has a {RECORD}")
    if named == NATIVE:
        raise UserError(f"{directory} is not a checkpoint of the trainer: it has no {RECORD}.")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} is not a drafter's checkpoint: it has neither {RECORD} nor config.json.")
    record, names = read_json(directory / "config.json"), open_weights(directory)
    candidates: list[Format] = [FORMATS[named]] if named else list(FORMATS.values())
    for each in candidates:
        if found := each.recognize(record, names.keys()):
            return Found(each.name, *found)
        if named and len(each.layouts) == 1:
            return Found(named, next(iter(each.layouts)), "as named by --from")
    raise UserError(
        f"The checkpoint in {directory} has no known format{f', and not the format {named}' if named else ''}: its architecture "
        f"is {record.get('architectures')}, and its first tensors are {', '.join(sorted(names)[:4])}. "
        "`draftsmith convert --list` prints the formats; --from names one."
    )


def leaves_tensors_out(source: Path, to: str, named: str | None = None) -> bool:
    """Whether reading the checkpoint in `source`, or writing it in the format `to`, takes the target's embedding or head."""
    found = recognize(source, named)
    layouts = {name: FORMATS[name].layouts.get(found.kind) for name in (found.format, to) if name != NATIVE}
    written = layouts.get(to)
    return any(layout is not None and layout.shared for layout in layouts.values()) or (
        written is not None and (written.wants_embedding or written.needs_embedding)
    )


def _shared_by(target: TargetInfo | None) -> SharedTensors | None:
    """Loads the target's tensors, once."""
    if target is None:
        return None
    return functools.cache(
        lambda: load_target_tensors(target.path, trust_remote_code=target.trust_remote_code),
    )


def read(
    directory: Path, found: Found, target: TargetInfo | None = None, *, shared: SharedTensors | None = None
) -> Checkpoint:
    """Read the checkpoint in `directory`; formats that leave out some of it need the drafter's `target`, whose tensors `shared` loads if it is
    given.

    Raises:
        UserError: its config is incomplete, or it cannot be converted.
        CorruptCheckpoint: it is damaged.
    """
    try:
        if found.format == NATIVE:
            return Checkpoint.load(directory).check()
        named: dict[str, str | None] = UNKNOWN_TARGET
        known: dict[str, Any] = {}
        if target is not None:
            named = {"name": target.name, "revision": target.revision, "config_hash": target.config_hash}
            known = drafter_class(found.kind).config_defaults(target)
        shared = shared or _shared_by(target)
        return FORMATS[found.format].read(directory, found.kind, target=named, known=known, shared=shared)
    except UserError as error:
        raise type(error)(f"{directory}, read as {found.format} ({found.kind}): {error}") from None


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
    """Write the drafter in `source` in the format `to` into a new directory, which appears only when it is complete.

    Args:
        named: format of `source`; None detects it.
        target: see `read`.
        dtype: torch's name of the floating-point type; None keeps the source's.
        vocabulary: resize the draft vocabulary to this many tokens, the most frequent of the responses in `store`.
        store: a finished store, if `vocabulary` is given.
        quantize: 8-bit weights in linear layers, one of `quantize.SCHEMES`; None for floating point.
        verify: before `out` appears, read the result back and compare its logits with the source's.
        served: with `verify` and `target`: compares the draft tokens of an engine that serves the directory with the drafter's
            own, and returns figures.

    Raises:
        UserError: `source` cannot be read, `to` cannot hold it, `store` is of another target, or `out` exists.
        DraftsmithError: a comparison failed.
    """
    started = time.time()
    require_new(out)
    found = recognize(source, named)
    console.print(
        f"convert: {source} is a drafter of the kind {found.kind} in the format {found.format}: {found.reason}"
    )
    if quantize is not None and to == NATIVE:
        raise UserError("The trainer's checkpoint holds floating-point weights. --quantize goes with --to vllm.")
    shared = _shared_by(target)
    original = checkpoint = read(source, found, target, shared=shared)
    if folds := to == "vllm" and needs_folding(checkpoint):
        checkpoint = folded(checkpoint)
        console.print(
            "convert: vLLM's `fc` has no bias; the drafter's is in the biases of its layer now, which compute the same"
        )
    if found.format != NATIVE and (scheme := scheme_of(read_json(source / "config.json"))) is not None:
        console.print(f"convert: its weights are quantized ({scheme}) and are read as floating-point numbers")
    tensors = None
    if shared is not None and (verify or vocabulary is not None):
        tensors = shared()
    if vocabulary is not None:
        assert store is not None
        if vocabulary > (most := checkpoint.config["vocab_size"]):
            raise UserError(f"--vocab {vocabulary} is more than the target's vocabulary, which has {most} tokens.")
        ids = choose_draft_vocabulary(_token_counts(store, checkpoint), vocabulary)
        checkpoint = with_vocabulary(checkpoint, ids, None if tensors is None else tensors.lm_head)
    with new_folder(out) as temporary:
        run = StageRun("convert", temporary, started)
        run.claim(fresh=False)
        if to == NATIVE:
            checkpoint.to(dtype).save(temporary)
        else:
            FORMATS[to].write(checkpoint, temporary, dtype=dtype, quantize=quantize, shared=shared)
            if (
                shared is None
                and EMBEDDING not in checkpoint.weights
                and FORMATS[to].layouts[found.kind].wants_embedding
            ):
                console.print(
                    f"convert: the result has no embedding, without which the {to} project's own classes compute with whatever is in memory "
                    "(vLLM takes the target's). Name the target with --target to have it written."
                )
            algorithm = FORMATS[to].sglang_algorithm
            trees = trees_of(source) if algorithm and vocabulary is None else None
            card = render(checkpoint, form=to, quantized=quantize, trees=trees, sglang_algorithm=algorithm)
            write_bytes(temporary / "README.md", card.encode())
        verified: dict[str, Any] | None = None
        if verify:
            result = read(temporary, Found(to, found.kind, ""), target, shared=shared)
            verified = dict(compare(original, result, tensors, rounded=quantize is not None, folded=folds))
            console.print(
                f"verified: on the same inputs the logits differ by {verified['relative_difference']:.2g} of their norm, and "
                f"{verified['same_first_choice']:.0%} of the top-1 tokens are the same"
            )
            if served is not None and tensors is not None:
                verified["served"] = served(temporary, result.drafter(tensors))
        figures: dict[str, Any] = {
            "from": found.format, "to": to, "kind": found.kind, "quantized": quantize,
            "parameters": sum(weight.count for weight in checkpoint.weights.values()),
            "bytes": sum(file.stat().st_size for file in temporary.iterdir()), "verified": verified,
        }  # fmt: skip
        run.finish(
            digest([str(source.resolve()), figures, dtype, vocabulary, str(store), quantize]), figures, recipe={}
        )
    if to == "vllm" and (window := checkpoint.config.get("sliding_window")) and not window_as_trained(found.kind):
        console.print(
            f"convert: its draft tokens were trained to see the last {window} tokens of the context, all the same ones. vLLM counts what is "
            "drafted before them too, so in longer contexts the last draft token sees fewer, by about as many as are drafted. That can cost "
            "acceptance, and changes no answer; up to that length all see what they were trained with."
        )
    scheme_title = f", {SCHEMES[quantize].title}" if quantize else ""
    console.print(
        f"convert: {out} holds {figures['parameters'] / 1e6:.1f} M parameters in the format {to}{scheme_title}, "
        f"{figures['bytes'] / 1e6:.1f} MB"
    )
    return figures


def _token_counts(store: Path, checkpoint: Checkpoint) -> torch.Tensor:
    """`Store.token_counts` of a store of the drafter's target: int64 [vocab]. Raises UserError: it is of another target."""
    found, size = Store(store), checkpoint.config["vocab_size"]
    theirs, ours = found.identity.target_config_hash, checkpoint.target["config_hash"]
    counts = found.token_counts(size)
    if (ours and theirs and ours != theirs) or len(counts) > size:
        raise UserError(
            f"The store at {store} is of another target than the drafter: of {found.identity.target} with the config {theirs[:16]} and tokens up "
            f"to {len(counts) - 1}, where the drafter is for {checkpoint.target['name'] or 'a target'} with the config "
            f"{(ours or 'unknown')[:16]} and {size} tokens. Name a store of the drafter's target with --store."
        )
    return counts


def window_as_trained(kind: str) -> bool:
    """Whether vLLM counts sliding windows as the kind's module does, and speculators' classes: P-EAGLE's moves on with every draft token."""
    made = drafter_class(kind)
    return issubclass(made, DecoderDrafter) and made.window_moves


def trees_of(checkpoint: Path) -> dict[str, Any] | None:
    """What was predicted of the trees of a run's drafter (`train.predict_trees`); None if nothing was, or of other weights.

    Args:
        checkpoint: `runs/NAME/checkpoint`.
    """
    file = checkpoint.resolve().parent / TREES
    if not file.is_file() or not (checkpoint / WEIGHTS).is_file():
        return None
    found: dict[str, Any] = read_json(file)
    return found if found.get("checkpoint") == sha256_of(checkpoint / WEIGHTS) else None


def table_of_formats() -> list[tuple[str, str, list[str], list[str]]]:
    """For each format: its name, title, kinds of drafter, and the formats that hold some of the same kinds."""
    holds = {name: sorted(each.layouts) for name, each in FORMATS.items()}
    holds = {NATIVE: sorted(set().union(*holds.values()))} | holds
    titles = {NATIVE: "the trainer's own checkpoint"} | {name: each.title for name, each in FORMATS.items()}
    return [
        (name, titles[name], kinds, [other for other in holds if other != name and set(holds[other]) & set(kinds)])
        for name, kinds in holds.items()
    ]
