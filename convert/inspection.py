"""`draftsmith inspect`: identify a directory, verify it, and describe what a store holds."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftsmith.config.drafters import KINDS, kind_of_architecture
from draftsmith.convert.convert import read, recognize
from draftsmith.drafters.checkpoint import RECORD, WEIGHTS, Checkpoint, CorruptCheckpoint
from draftsmith.drafters.layout import EXTRA, look_up
from draftsmith.run import stage
from draftsmith.run.atomic_io import read_json
from draftsmith.run.errors import UserError
from draftsmith.run.weights import Weight, open_weights, weight_files
from draftsmith.store.format import MANIFEST, CorruptStore
from draftsmith.store.reader import Store
from draftsmith.target.hub import is_snapshot

COVERAGE_SIZES = tuple(2**n for n in range(8, 19))
"""Draft vocabulary sizes at which coverage is reported, up to the first that covers the training part."""


def inspect(directory: Path, *, stats: bool = False) -> dict[str, Any]:
    """Identify `directory` and verify it by reading all of it.

    Returns `kind` (`store`, `checkpoint`, `vllm`, or `drafter` of another format or damaged), `path`, `finished` (whether
    its stage finished), `good`, `about` (what it holds), `damage` if not good (`file`, byte range `start : end` if known,
    `message`, `places`: how many), and with `stats`, for a store, the result of `store_stats`. A good drafter from elsewhere may have
    `not_compared`: why its tensors were not compared with its config.

    Raises:
        UserError: it is none of these, or its format or kind is of another version.
        PermissionError: a file may not be read.
    """
    record = stage.read(directory)
    finished = is_snapshot(directory) or record is not None  # a commit on the Hub is complete
    report = {"path": str(directory), "finished": finished} if directory.is_dir() else {}
    if (directory / MANIFEST).is_file():
        return report | {"kind": "store"} | _inspect_store(directory, stats=stats)
    if stats:
        raise UserError(f"`--stats` is for stores, and {directory} is not one: it has no {MANIFEST}.")
    if (directory / RECORD).is_file():
        report |= {"kind": "checkpoint"} | _inspect_checkpoint(directory)
    elif (directory / "config.json").is_file() and weight_files(directory):
        report |= _inspect_drafter(directory)
    if "kind" in report:
        if report["good"] and (changed := stage.changed_file(directory, record or {})) is not None:
            report |= _damaged_drafter(
                directory, f"{changed.name} is not as {stage.MARKER} records it. Run its stage again."
            )
        return report
    outputs = [name for name in ("store", "checkpoint", "vllm") if (directory / name).is_dir()]
    hint = f" It is a run: inspect {' or '.join(str(directory / name) for name in outputs)}." if outputs else ""
    raise UserError(
        f"{directory} is not a store ({MANIFEST}), checkpoint ({RECORD}) or drafter (config.json and files with "
        f"tensors).{hint}"
    )


def _inspect_store(directory: Path, *, stats: bool) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        store = Store(directory)
        corruptions = list(store.corruptions())
    except CorruptStore as damage:  # of the manifest or a shard's header: nothing else can be read
        return {"good": False, "about": {}, "damage": _damage(damage, places=1)}
    seconds = time.perf_counter() - started
    about = {
        "target": store.identity.target,
        "target_revision": store.identity.target_revision,
        "layer_ids": list(store.identity.layer_ids),
        "dtype": store.identity.dtype,
        "states": store.identity.states,
        **store.counts,
        "share_of_uncompressed": round(store.counts["bytes"] / max(1, store.plain_bytes), 4),
        "verified_mb_per_second": round(store.counts["bytes"] / 1e6 / seconds, 1),
    }
    if corruptions:
        return {"good": False, "about": about, "damage": _damage(corruptions[0], places=len(corruptions))}
    return {"good": True, "about": about, **({"stats": store_stats(store)} if stats else {})}


def _damage(damage: CorruptStore, *, places: int) -> dict[str, Any]:
    place = {"file": str(damage.path), "start": damage.start, "end": damage.end}
    return place | {"message": str(damage), "places": places}


def _inspect_checkpoint(directory: Path) -> dict[str, Any]:
    """Verify that it loads: the safetensors file is whole, its tensors are those of the config, and their values finite."""
    try:
        if not (directory / WEIGHTS).is_file():
            raise CorruptCheckpoint("it is missing")
        found = Checkpoint.load(directory).check()
        _check_finite(found.weights)
    except CorruptCheckpoint as error:
        message = f"{directory} is damaged: {WEIGHTS} or its description cannot be used ({error}). Run its stage again."
        return {
            "good": False,
            "about": {},
            "damage": {"file": str(directory / WEIGHTS), "message": message, "places": 1},
        }
    about = {
        "drafter": found.kind,
        "target": found.target["name"],
        "target_revision": found.target["revision"],
        "draft_vocab_size": len(found.draft_token_ids),
        "parameters": sum(weight.count for weight in found.weights.values()),
        "predicted_acceptance_length": found.training.get("predicted_acceptance_length"),
    }
    return {"good": True, "about": about}


def _check_finite(weights: Mapping[str, Weight]) -> None:
    """Raises CorruptCheckpoint: a tensor has values that are not finite."""
    for name, weight in weights.items():
        for values in weight.parts() if weight.dtype.is_floating_point else ():
            wide = values.float() if values.itemsize == 1 else values  # isfinite does not support 8-bit floats
            if not torch.isfinite(wide).all():
                raise CorruptCheckpoint(f"the tensor {name} has values that are not finite")


def _inspect_drafter(directory: Path) -> dict[str, Any]:
    """Verify a drafter of any format: that its files open, are whole and hold only finite values, and that it can be read as conversion
    reads it, unless it is of a kind or form that only vLLM knows, or leaves a part to its target. Raises UserError: it is no drafter."""
    try:
        record, weights = read_json(directory / "config.json"), open_weights(directory)
    except UserError as error:
        return {"kind": "drafter"} | _damaged_drafter(directory, str(error))
    try:
        found = recognize(directory)
    except UserError:
        found = None  # of a kind that only vLLM knows, or no drafter
    named = record.get("architectures") if isinstance(record.get("architectures"), list) else None
    drafts = "draft_vocab_size" in record or any(map(kind_of_architecture, map(str, named or ())))
    if found is None and not drafts and not stage.read(directory):
        raise UserError(f"{directory} is a model for transformers or vLLM, not a drafter in a known format.")
    report: dict[str, Any] = {"kind": "vllm" if found is None or found.format == "vllm" else "drafter"}
    # Files of our own in vLLM's format have all that vLLM reads; those from elsewhere may leave some out.
    made_as = KINDS.get(str(look_up(record, f"{EXTRA}.kind"))) if report["kind"] == "vllm" else None
    for name in made_as.serving.further_files if made_as else ():
        if not (directory / name).is_file():
            return report | _damaged_drafter(directory, f"{name} is missing. Run its stage again.")
    not_compared = "its format is not one of `draftsmith convert --list`."
    try:
        _check_finite(weights)
        if found is not None:
            read(directory, found)
            not_compared = ""
    except CorruptCheckpoint as error:
        return report | _damaged_drafter(directory, f"{str(error).rstrip('.')}. Get it again, or run its stage again.")
    except UserError as error:
        if made_as:
            return report | _damaged_drafter(directory, str(error))
        not_compared = str(error)
    about = {
        **({} if found is None else {"drafter": found.kind, "format": found.format}),
        "architectures": named,
        "draft_vocab_size": record.get("draft_vocab_size"),
        "bytes": sum(path.stat().st_size for path in weight_files(directory)),
    }
    return report | {"good": True, "about": about} | ({"not_compared": not_compared} if not_compared else {})


def _damaged_drafter(directory: Path, why: str) -> dict[str, Any]:
    damage = {"file": str(directory), "message": f"{directory} is damaged: {why}", "places": 1}
    return {"good": False, "about": {}, "damage": damage}


# ---- what a store holds ----


def store_stats(store: Store) -> dict[str, Any]:
    """Sequence lengths, token counts and vocabulary coverage of a store.

    Returns:
        `lengths`: min, median, mean and max tokens per sequence, and `histogram`: rows of [from, below, sequences]; None for an
        empty store;
        `tokens`: counts of the training and the held-out part;
        `coverage`: rows of {`vocabulary`: V, `training`, `held_out`: share of that part's response tokens that are among the V
        most frequent of the training part; None if a part has no responses}.
    """
    rows = {part: store.rows(held_out=part == "held_out") for part in ("training", "held_out")}
    lengths = torch.tensor([store.length(row) for row in range(len(store))], dtype=torch.int64)
    responses = {part: store.response_tokens(held_out=part == "held_out") for part in rows}
    summary = None
    if len(lengths):
        summary = {
            "min": int(lengths.min()), "median": int(lengths.median()), "mean": round(lengths.double().mean().item(), 1),
            "max": int(lengths.max()), "histogram": _histogram(lengths),
        }  # fmt: skip
    return {
        "lengths": summary,
        "tokens": {
            part: {
                "sequences": len(rows[part]),
                "tokens": sum(store.length(row) for row in rows[part]),
                "response_tokens": len(responses[part]),
                "distinct_response_tokens": len(responses[part].unique()),
            }
            for part in rows
        },
        "coverage": _coverage(responses["training"], responses["held_out"]),
    }


def _histogram(lengths: torch.Tensor) -> list[list[int]]:
    width = -(-int(lengths.max() + 1) // 12)
    width = max(1, -(-width // 8) * 8 if width > 8 else width)  # round edges
    counts = torch.bincount(lengths // width).tolist()
    return [[number * width, (number + 1) * width, count] for number, count in enumerate(counts)]


def _coverage(training: torch.Tensor, held_out: torch.Tensor) -> list[dict[str, Any]]:
    if not len(training):
        return []
    size = int(max(training.max(), held_out.max() if len(held_out) else 0)) + 1
    counts = torch.bincount(training, minlength=size)
    rank = torch.empty(size, dtype=torch.int64)
    rank[counts.argsort(descending=True, stable=True)] = torch.arange(size)  # ties: lower ids first
    rank[counts == 0] = size  # tokens not in the training part are in no draft vocabulary
    distinct = int((counts > 0).sum())
    sizes = [v for v in COVERAGE_SIZES if v < distinct] + [distinct]

    def share(tokens: torch.Tensor, vocabulary: int) -> float | None:
        return round((rank[tokens] < vocabulary).double().mean().item(), 4) if len(tokens) else None

    return [{"vocabulary": v, "training": share(training, v), "held_out": share(held_out, v)} for v in sizes]


def write_plot(stats: dict[str, Any], path: Path) -> None:
    """Plot lengths and coverage to a file, whose suffix selects the format.
    Raises UserError: the folder or matplotlib is missing, or matplotlib cannot write the file."""
    if path.is_dir() or not path.suffix:  # matplotlib would write another file, PATH.png
        raise UserError(
            f"The plot cannot be written to {path}: it has no suffix that says a format, or is a folder. Name a .png, .svg or .pdf file."
        )
    if not path.parent.is_dir():
        raise UserError(f"The plot cannot be written to {path}: there is no folder {path.parent}.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("`--plot` needs matplotlib: `pip install -e '.[plots]'` in Draftsmith's folder.") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    histogram = stats["lengths"]["histogram"] if stats["lengths"] else []
    for start, end, count in histogram:
        left.bar(start, count, end - start, align="edge", color="C0")
    left.set(xlabel="tokens per sequence", ylabel="sequences")
    for part, label in (("training", "training part"), ("held_out", "held-out part")):
        points = [(row["vocabulary"], row[part]) for row in stats["coverage"] if row[part] is not None]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", label=label)
            right.set_xscale("log", base=2)
    right.set(xlabel="most frequent tokens of the training part", ylabel="share of response tokens")
    right.grid(alpha=0.3)
    if right.lines:
        right.legend()
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise UserError(f"The plot cannot be written to {path}: {error}. Name a .png, .svg or .pdf file.") from None
