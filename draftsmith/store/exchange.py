"""Stores to and from the layouts of other programs.

    files         a folder with a file a sequence (`states_file.py`), as vLLM's example connector leaves them
    speculators   speculators' data set: Arrow rows (`input_ids`, `loss_mask`, `seq_len`) as `datasets` saves them, `token_freq.pt`,
                  and in `hidden_states` a file `hs_N.safetensors` for row N

An exported store is imported bit for bit, since its files also hold what these layouts have no place for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith.data.chat_template import Renderer, Unrenderable
from draftsmith.data.conversations import Conversation, RejectedRows
from draftsmith.data.overlap import TRAINING_PROMPTS, PromptsFile
from draftsmith.run.atomic_io import new_folder, sha256_of
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar, console
from draftsmith.run.stage import StageRun
from draftsmith.store.codec import Form
from draftsmith.store.format import MANIFEST, Sequence, StoreIdentity
from draftsmith.store.imported_prompts import Questions
from draftsmith.store.reader import Store
from draftsmith.store.states_file import read_states_file, write_states_file
from draftsmith.store.writer import StoreWriter
from draftsmith.target.info import TargetInfo
from draftsmith.target.layer_ids import check_layer_ids
from draftsmith.target.pretrained import tokenizer_of

Layout = Literal["files", "speculators"]
LossMask = Literal["template", "ones"]

_SHARD_TOKENS = 8192


# ---- out ----


def export_store(store: Store, layout: Layout, out: Path) -> dict[str, Any]:
    """Write a store's sequences to the folder `out`, the training part first.

    Returns:
        `sequences`, `held_out_sequences`, and for speculators, if any are held out, the `train_data_ratio` that keeps the split.

    Raises:
        UserError: the store is empty, or `out` exists.
        CorruptStore: the store is not as it was written.
        DraftsmithError: the disk is full.
    """
    training, held_out = store.rows(held_out=False), store.rows(held_out=True)
    if not len(store):
        raise UserError(f"The store at {store.directory} has no sequences to export.")
    figures: dict[str, Any] = {"sequences": len(store), "held_out_sequences": len(held_out)}
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    with new_folder(out) as folder, Bar("export", total=len(store), unit="sequences") as bar:
        files = folder if layout == "files" else folder / "hidden_states"
        files.mkdir(exist_ok=True)
        for number, index in enumerate(training + held_out):
            sequence = store[index]
            name = f"{sequence.sample_id:016x}" if layout == "files" else f"hs_{number}"
            write_states_file(files / f"{name}.safetensors", sequence, store.identity)
            if layout == "speculators":
                count = len(sequence.hidden_states)
                rows["input_ids"].append(sequence.token_ids[:count].long().numpy())
                rows["loss_mask"].append(sequence.loss_mask[:count].long().numpy())
                rows["seq_len"].append(count)
            bar.step()
        if layout == "speculators":
            _save_rows(rows, folder)
            frequencies = torch.bincount(store.response_tokens(held_out=False))
            seen = frequencies.nonzero().flatten().tolist()
            torch.save({token: int(frequencies[token]) for token in seen}, folder / "token_freq.pt")
            if held_out:
                figures["train_data_ratio"] = (len(training) + 0.5) / len(store)  # it rounds the product down
    console.print(f"export: {out} holds {len(store)} sequences", highlight=False, soft_wrap=True)
    return figures


def _save_rows(rows: dict[str, list[Any]], folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(folder)


# ---- in ----


def import_states(
    source: Path,
    out: Path,
    *,
    target: TargetInfo,
    layer_ids: tuple[int, ...],
    loss_mask: LossMask | None = None,
    held_out_fraction: float = 0.05,
    compression: Form = "lossless",
) -> dict[str, Any]:
    """Make a finished store of a folder in either layout. Every sequence is checked; if one cannot be used, there is no store.

    Args:
        layer_ids: of the states, in their order.
        loss_mask: `template`: what the target's chat template marks as answers; `ones`: every token; None: what files and rows
            say, and `template` where they say nothing.
        held_out_fraction: of sequences that do not say whether they are held out; a hash of the tokens before the first
            answer decides.

    Returns:
        The figures of `stage.json`.

    Raises:
        UserError: `source` has neither layout, `out` exists, a sequence cannot be used (a line for each is printed), or the
            states are of another target or other layers.
        DraftsmithError: the disk is full.
    """
    check_layer_ids(layer_ids, target.num_hidden_layers)
    if list(layer_ids) != sorted(layer_ids):
        raise UserError("--layer-ids must be in ascending order, in which vLLM writes the states whatever it is asked.")
    reader = _Reader(target, layer_ids, loss_mask, held_out_fraction, compression)
    rejected = RejectedRows()
    found = list(_speculators_files(source, rejected) if _is_data_set(source) else _files(source))
    unusable, seen = 0, set[int]()
    identity: StoreIdentity | None = None
    writer: StoreWriter | None = None
    with new_folder(out) as folder, ExitStack() as stack:
        run = StageRun("import", folder)
        run.claim(fresh=False)
        asked = PromptsFile(folder)
        questions = Questions(reader.tokenizer) if target.path.is_dir() else None
        bar = stack.enter_context(Bar("import", total=len(found), unit="sequences"))
        for path, row in found:
            bar.step()
            try:
                sequence, its_identity = reader.read(path, row)
                if writer is None:
                    identity = its_identity
                    made = StoreWriter(folder, identity, shard_tokens=_SHARD_TOKENS, compression=compression)
                    writer = stack.enter_context(made)
                if its_identity != identity:
                    raise ValueError("its states have another dtype or origin than those of the files before")
                if sequence.sample_id in seen:
                    rejected.add("the same sequence occurs twice", path.name)
                else:
                    writer.append(sequence)
                    seen.add(sequence.sample_id)
                    if questions is not None and not sequence.held_out:
                        asked.add(questions.of(sequence.token_ids, sequence.loss_mask))
            except ValueError as error:
                unusable += 1
                said = " ".join(str(error).split())
                console.print(f"import: {path}: {said}", highlight=False, markup=False, soft_wrap=True)
        for line in rejected.lines():
            console.print(f"import: not used: {line}", highlight=False, markup=False, soft_wrap=True)
        if unusable:
            raise UserError(
                f"{unusable} of {len(found)} sequences in {source} cannot be used, so no store was written. The lines above "
                "name each and the reason: make them again, or move them away."
            )
        if writer is None:
            raise UserError(
                f"No row of {source} has a file of states, in {source / 'hidden_states'}. Generate them first."
            )
        counts = writer.close()
        if questions is not None:
            asked.publish(folder)
        options = {
            "mode": "import", "prompts": {"path": str(source.resolve())}, "layer_ids": list(layer_ids), "loss_mask": loss_mask,
            "held_out_fraction": held_out_fraction, "compression": compression,
        }  # fmt: skip
        figures = run.finish(
            sha256_of(folder / MANIFEST),
            counts | {"rows_skipped": rejected.figures()},
            recipe={"target": {"model": target.name}, "extract": options},
            files=(TRAINING_PROMPTS,) if questions is not None else (),
        )
    console.print(
        f"import: {out} holds {counts['sequences']} sequences, {counts['held_out_sequences']} of them held out",
        highlight=False,
        soft_wrap=True,
    )
    return figures


_Row = Callable[[], dict[str, Any]] | None
"""Reads a row of speculators' data set, empty if it has none for the file; None where there are only files."""


def _files(source: Path) -> Iterator[tuple[Path, _Row]]:
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise UserError(
            f"There are no hidden states in {source}: neither .safetensors files, one a sequence, nor a data set of speculators "
            "(with state.json and hidden_states/)."
        )
    yield from ((path, None) for path in paths)


def _is_data_set(source: Path) -> bool:
    return (source / "state.json").exists() or (source / "dataset_info.json").exists()


def _speculators_files(source: Path, rejected: RejectedRows) -> Iterator[tuple[Path, _Row]]:
    """The files of rows that have one, and files of no row, which are errors."""
    import datasets

    try:
        rows = datasets.load_from_disk(str(source))
        rows.data.validate(full=True)  # it is memory-mapped, and offsets are used unchecked
        rows = rows.with_format(None).select_columns(
            [name for name in ("input_ids", "loss_mask") if name in rows.column_names]
        )
        count = len(rows)
    except Exception as error:  # pyarrow and datasets raise many kinds
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"Cannot read {source} as a data set of speculators: {type(error).__name__}: {reason}. Prepare it again."
        ) from None
    folder = source / "hidden_states"
    for number in range(count):
        path = folder / f"hs_{number}.safetensors"
        if path.exists():
            yield path, partial(rows.__getitem__, number)
        else:
            rejected.add("a row without a file of states", f"row {number}")
    known = {f"hs_{number}.safetensors" for number in range(count)}
    yield from ((path, dict) for path in sorted(folder.glob("hs_*.safetensors")) if path.name not in known)


@dataclass(frozen=True)
class _Reader:
    """Reads sequences as `import_states` is asked to."""

    target: TargetInfo
    layer_ids: tuple[int, ...]
    loss_mask: LossMask | None
    held_out_fraction: float
    compression: Form

    def read(self, path: Path, row: _Row) -> tuple[Sequence, StoreIdentity]:
        """A file's sequence, and what it was made from.

        Raises:
            ValueError: it cannot be used.
            UserError: it is of another target or other layers.
        """
        token_ids, states, about = read_states_file(path)
        given = None if row is None else _mask_of_row(row(), token_ids)
        identity = self._identity(path, str(states.dtype).removeprefix("torch."), about)
        next_token = None
        if about is not None:
            next_token, mask = about["next_token_id"], about["loss_mask"]
            if given is not None and not torch.equal(given, mask[: len(given)]):
                raise ValueError("its row has another loss mask than the file")
            given = mask
        if next_token is not None:
            token_ids = torch.cat([token_ids, token_ids.new_tensor([next_token])])
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.target.vocab_size:
            raise ValueError(f"a token id is outside the target's vocabulary of {self.target.vocab_size}")
        token_ids = token_ids.int()
        mask = self._mask(token_ids, given)
        if about is not None:
            return Sequence(about["sample_id"], about["held_out"], token_ids, mask, states, about["images"]), identity
        content = Conversation(id="", token_ids=token_ids.tolist(), loss_mask=mask.tolist())
        held_out = _uniform(token_ids, mask) < self.held_out_fraction
        return Sequence(content.sample_id, held_out, token_ids, mask, states), identity

    def _identity(self, path: Path, dtype: str, about: dict[str, Any] | None) -> StoreIdentity:
        target = self.target
        asked: dict[str, Any] = {
            "target_revision": target.revision, "target_config_hash": target.config_hash, "tokenizer_hash": target.tokenizer_hash,
            "chat_template_hash": target.chat_template_hash, "layer_ids": self.layer_ids, "hidden_size": target.hidden_size,
        }  # fmt: skip
        states = "int8" if self.compression == "int8" else "exact"
        if about is None:
            return StoreIdentity(target=target.name, dtype=dtype, sampling={"mode": "import"}, states=states, **asked)
        try:
            written = StoreIdentity(**about["identity"] | {"layer_ids": tuple(about["identity"]["layer_ids"])})
        except TypeError:
            raise ValueError("another version of Draftsmith exported it") from None
        written.require_fields(asked, path, way_out="Name the target and the layer ids of these states.")
        rounded = {} if written.states == "exact" else {"states": written.states}  # not to be mixed with exact ones
        return replace(written, states=states, sampling=written.sampling | rounded)

    def _mask(self, token_ids: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """bool [N]"""
        if self.loss_mask == "ones":
            return torch.ones(len(token_ids), dtype=torch.bool)
        if self.loss_mask is None and given is not None:
            return given
        if self.target.chat_template_hash is None:
            raise UserError(
                f"The target {self.target.name} has no chat template, by which to find the answers. With --loss-mask ones, all "
                "tokens are trained on."
            )
        try:
            return torch.tensor(self._renderer.answers_in(token_ids.tolist()))
        except Unrenderable as reason:
            raise ValueError(f"{reason}; with --loss-mask ones, all tokens are trained on") from None

    @cached_property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.target.path, trust_remote_code=self.target.trust_remote_code)

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.tokenizer)


def _mask_of_row(row: dict[str, Any], token_ids: torch.Tensor) -> torch.Tensor | None:
    """The loss mask of a row, bool [M]; None if the data set has none.

    Raises:
        ValueError: the row does not belong to the tokens.
    """
    if row.get("input_ids") != token_ids.tolist():
        raise ValueError("its row has other tokens" if row else "the data set has no row for it")
    if "loss_mask" not in row:
        return None
    mask = row["loss_mask"]
    if not isinstance(mask, list) or len(mask) != len(token_ids) or not all(value in (0, 1) for value in mask):
        raise ValueError("the loss_mask of its row is not a list of 0s and 1s as long as the tokens")
    return torch.tensor(mask, dtype=torch.bool)


def _uniform(token_ids: torch.Tensor, mask: torch.Tensor) -> float:
    """A number in [0, 1) that depends only on the tokens before the first answer; on all if there are none before."""
    prompt = int(mask.int().argmax()) or len(token_ids)
    found = hashlib.sha256(token_ids[:prompt].numpy().tobytes()).digest()
    return int.from_bytes(found[:8], "big") / 2**64
