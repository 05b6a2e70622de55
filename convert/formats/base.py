"""A format: a layout for each kind of drafter that it can hold, and reading and writing with it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith.convert.formats import blocks
from draftsmith.convert.quantize import SCHEMES, dequantized, quantized
from draftsmith.convert.vocabulary import MAPS, from_tensors, to_tensors
from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import EMBEDDING, UNKNOWN_TARGET, Checkpoint, CorruptCheckpoint
from draftsmith.drafters.dflash import MASK_FILE, DFlashConfig, read_mask
from draftsmith.drafters.layout import EXTRA, Layout, Rows, Source, look_up, put
from draftsmith.run.atomic_io import read_json, write_bytes, write_json
from draftsmith.run.errors import UserError
from draftsmith.run.weights import Weight, listed, open_weights, write_safetensors
from draftsmith.target.tensors import TargetTensors

SharedTensors = Callable[[], TargetTensors]
"""Loads the target's tensors, which is done only where a format leaves some out."""
_OF_TARGET = f"{EXTRA}.embedding_of_target"
"""Whether the embedding is the target's but for rows that the format has no other place for."""
_SHARED_BY = {
    blocks.MASK: "`train.drafter.train_mask_embedding: false`",
    blocks.HEAD: "`train.drafter.draft_vocab_size: null` and without `train.train_lm_head`",
}
"""Options of recipes with which a drafter's tensor stays the target's."""


@dataclass(frozen=True)
class Format:
    """A published format."""

    name: str
    title: str
    """One line, for `draftsmith convert --list`."""
    layouts: Mapping[str, Layout]
    """By kind of drafter."""
    recognize: Callable[[Mapping[str, Any], Collection[str]], tuple[str, str] | None]
    """Takes `config.json` and the tensors' names; returns the kind and the reason, or None for another format."""
    target_name: str = ""
    """Path in `config.json` of the target's name or Hub id; empty if the format has none."""
    weights_file: str = "model.safetensors"
    """The file that the format's other readers open."""
    sglang_algorithm: str | None = None
    """SGLang's name of the method, where SGLang serves the format, and with it trees of draft tokens; None elsewhere."""
    loaded_by_vllm: Literal["nowhere", "on GPUs", "everywhere"] = "nowhere"
    """Where vLLM serves a drafter of this format as it is, and rightly but for `misread_by_vllm`. In vLLM's own format it always does."""
    complete_for_vllm: Callable[[Mapping[str, Any], str], bool] = lambda record, kind: True
    """Whether `config.json` states, where all of vLLM looks that serves the kind, what has another default in vLLM than in the format. Where it
    does not, the drafter is converted."""
    misread_by_vllm: tuple[Callable[[Source], str | None], ...] = ()
    """Each says what a drafter that vLLM loads as it is computes, and vLLM does not, without an error; None for nothing."""

    def read(
        self,
        directory: Path,
        kind: str,
        *,
        target: Mapping[str, Any],
        known: Mapping[str, Any],
        shared: SharedTensors | None = None,
    ) -> Checkpoint:
        """Read a checkpoint of this format, `config.json` and the tensors.

        Args:
            target: name, revision and config_hash, if the user named the target; else `UNKNOWN_TARGET`.
            known: from the target: fields that the format leaves out.
            shared: the target's tensors, of which the format may leave some out; None if the target was not named.

        Raises:
            UserError: a part is unknown, or left to a target that was not named, or computes what the kind's module does not.
            CorruptCheckpoint: tensors are missing, or contradict the config.
        """
        layout = self.layouts[kind]
        record, weights = dequantized(read_json(directory / "config.json"), open_weights(directory))
        source = Source(record, {name: weight.shape for name, weight in weights.items()}, known)
        checkpoint = Checkpoint(kind, layout.read(source), {}, torch.empty(0), {})
        config = checkpoint.drafter_config()
        ids, order = torch.arange(config.draft_vocab_size), None
        if layout.maps_vocabulary:
            maps = {name: weights.pop(name).tensor() for name in MAPS if name in weights}
            ids, order = from_tensors(maps, vocabulary=config.vocab_size, size=config.draft_vocab_size)
        has_mask = blocks.MASK in drafter_class(kind).shapes(config)
        if has_mask and isinstance(config, DFlashConfig) and (mask := read_mask(directory, config)) is not None:
            # In whatever format the rest is, vLLM takes the mask from that file before any row of an embedding.
            if blocks.MASK in weights and not _equal_but_for_rounding(weights[blocks.MASK].tensor(), mask):
                raise UserError(
                    f"Its mask is in {MASK_FILE}, from which vLLM takes it, and as the tensor `{blocks.MASK}`, and the two differ. They are of "
                    "different drafters, or of different trainings of one: get both again, or remove the one that is not this drafter's."
                )
            weights.setdefault(blocks.MASK, Weight.of(mask))
        training = look_up(record, f"{EXTRA}.training")
        tensors = self._by_tensor_of_kind(kind, config, weights, tied=bool(record.get("tie_word_embeddings")))
        if order is not None:
            for name in drafter_class(kind).rows_by_draft_token:
                # One of another length is left as it is, for `check` to find.
                if name in tensors and tensors[name].shape[:1] == (len(order),):
                    tensors[name] = tensors[name].rows(order)
        for name, rows in layout.shared.items():
            if name not in tensors and (index := rows.which(config, ids)) is not None:
                tensors[name] = Weight.of(_rows_of(rows, index, tensors, shared, name))
        if look_up(record, _OF_TARGET) is True:
            tensors.pop(EMBEDDING, None)
        return Checkpoint(
            kind,
            config.to_dict(),
            self._target_of(record) if target["name"] is None else dict(target),
            ids,
            tensors,
            dict(training) if isinstance(training, Mapping) else {},
        ).check()

    def _target_of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The target that `config.json` names."""
        noted = look_up(record, f"{EXTRA}.target")
        if isinstance(noted, Mapping) and UNKNOWN_TARGET.keys() <= noted.keys():
            return dict(noted)
        name = look_up(record, self.target_name) if self.target_name else None
        return UNKNOWN_TARGET | ({"name": name} if isinstance(name, str) else {})

    def _by_tensor_of_kind(
        self, kind: str, config: Any, weights: Mapping[str, Weight], *, tied: bool
    ) -> dict[str, Weight]:
        """The weights by the names of the kind's module instead of the format's."""
        shapes = drafter_class(kind).shapes(config)
        names = self.layouts[kind].names(config, tuple(shapes))
        if drafter_class(kind).has_embedding:
            names = {**names, EMBEDDING: EMBEDDING}
        if unknown := sorted(weights.keys() - names.keys()):
            raise UserError(
                f"A drafter of the kind {kind} has no tensors {listed(unknown)}. Dropping them could change what it computes, so "
                "it was not converted."
            )
        found: dict[str, Weight] = {}
        for stored, name in names.items():
            if stored not in weights:
                continue
            if name in found and not _same(found[name], weights[stored]):
                raise UserError(f"{stored} differs from another step's tensor although the config ties the weights.")
            found.setdefault(name, weights[stored])
        if tied and "lm_head.weight" in shapes and EMBEDDING in found:
            found.setdefault("lm_head.weight", found[EMBEDDING])
        left_out = self.layouts[kind].shared.keys()
        if missing := sorted(shapes.keys() - found.keys() - left_out):
            stored_as = {name: stored for stored, name in reversed(names.items())}
            raise CorruptCheckpoint(
                f"The checkpoint lacks {listed([stored_as[name] for name in missing])}. It is incomplete or of another "
                "format; nothing was made up in their place."
            )
        return found

    def write(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        *,
        dtype: str | None = None,
        quantize: str | None = None,
        shared: SharedTensors | None = None,
    ) -> int:
        """Write a checkpoint into `directory`, `config.json` last; return the size of its tensors in bytes.

        Args:
            dtype: torch's name of the floating-point type; None keeps the source's.
            quantize: 8-bit weights in linear layers, one of `quantize.SCHEMES`; None for floating point.
            shared: the target's tensors, of which the format may leave some out; None if the target was not named.

        Raises UserError: the format cannot express the drafter, or its readers take no such weights.
        """
        record, weights = self.to_files(checkpoint, dtype=dtype, shared=shared)
        if quantize is not None:
            eight_bits = self.layouts[checkpoint.kind].eight_bits
            if eight_bits is None:
                able = [kind for kind, layout in self.layouts.items() if layout.eight_bits is not None]
                raise UserError(
                    f"The format {self.name} has 8-bit weights for drafters of the kind {', '.join(able) or '(none)'}, and this "
                    f"drafter is of the kind {checkpoint.kind}. Leave --quantize out{'' if able else ', or write the format vllm'}."
                )
            but = eight_bits.floating(rounds_inputs=SCHEMES[quantize].inputs is not None)
            record, weights = quantized(record, weights, quantize, but=but)
            record |= eight_bits.keys
        size = write_safetensors(directory / self.weights_file, weights)
        config = checkpoint.drafter_config()
        for name, content in self.layouts[checkpoint.kind].further_files.items():
            write_bytes(directory / name, content(config, weights))
        write_json(directory / "config.json", record)
        return size

    def to_files(
        self, checkpoint: Checkpoint, *, dtype: str | None = None, shared: SharedTensors | None = None
    ) -> tuple[dict[str, Any], dict[str, Weight]]:
        """Return `config.json` and the tensors as the format stores them; see `write`."""
        layout = self.layouts.get(checkpoint.kind)
        if layout is None:
            raise UserError(
                f"The format {self.name} holds drafters of the kind {', '.join(self.layouts)}, and this one is of the kind "
                f"{checkpoint.kind}."
            )
        config = checkpoint.drafter_config()
        try:
            layout.check(config)
        except UserError as error:
            raise UserError(f"The format {self.name} cannot hold this drafter: {error}.") from None
        source, of_target = self._without_shared(checkpoint, shared)
        source = replace(checkpoint, weights=source).to(dtype).weights
        names = layout.names(config, tuple(name for name in source if name != EMBEDDING))
        weights = {stored: source[name] for stored, name in names.items()}
        if EMBEDDING in source:
            weights[EMBEDDING] = source[EMBEDDING]
        types = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()})
        if layout.maps_vocabulary:
            weights |= to_tensors(checkpoint.draft_token_ids, vocabulary=config.vocab_size)
        record = layout.write(config)
        if self.target_name and checkpoint.target["name"] and not layout.taken_from_target(config) & weights.keys():
            put(record, self.target_name, checkpoint.target["name"])
        extra = record.setdefault(EXTRA, {})
        if of_target:
            put(record, _OF_TARGET, True)
        extra |= {"kind": checkpoint.kind, "target": checkpoint.target, "training": checkpoint.training}
        return record | {"torch_dtype": types[0] if len(types) == 1 else "float32"}, weights

    def _without_shared(
        self, checkpoint: Checkpoint, shared: SharedTensors | None
    ) -> tuple[Mapping[str, Weight], bool]:
        """The weights that the format stores, and whether the embedding among them is the target's but for some rows."""
        layout, config, ids = self.layouts[checkpoint.kind], checkpoint.drafter_config(), checkpoint.draft_token_ids
        weights, of_target = dict(checkpoint.weights), False
        if EMBEDDING in weights and not layout.has_embedding:
            raise UserError(
                f"The format {self.name} cannot hold this drafter: it has an embedding of its own, and the format's readers take the target's."
            )
        for name, rows in layout.shared.items():
            index = rows.which(config, ids)
            own = rows.table == "embedding" and EMBEDDING in weights
            known = index is not None and (own or shared is not None)
            ours = weights[name].tensor()
            if known:
                theirs = _rows_of(rows, index, weights, shared, name)
                if ours.shape == theirs.shape and torch.equal(ours, theirs.to(ours.dtype)):
                    del weights[name]
                    continue
            if rows.otherwise == "refused":
                because = "differs from it" if known else "is not known to be the same"
                trained = f" A recipe trains one that shares it with {_SHARED_BY[name]}."
                hint = trained if known or index is None else " If it is, name the target with --target."
                raise UserError(
                    f"The format {self.name} cannot hold this drafter: its readers take `{name}` from the target's {rows.table}, and the "
                    f"drafter's own {because}.{hint}"
                )
            if rows.otherwise == "in_embedding":
                if not known:
                    raise UserError(
                        f"The format {self.name} has no place for the drafter's `{name}` but a row of an embedding of its own, whose other rows "
                        "are the target's. Name the target with --target."
                    )
                table = weights[EMBEDDING].tensor() if own or shared is None else shared().embedding
                table = table.to(torch.promote_types(table.dtype, ours.dtype), copy=True)
                table[index] = ours.to(table.dtype)
                weights[EMBEDDING], of_target = Weight.of(table), not own
                del weights[name]
        if (layout.wants_embedding or layout.needs_embedding) and EMBEDDING not in weights and shared is not None:
            weights[EMBEDDING], of_target = Weight.of(shared().embedding), True
        if layout.needs_embedding and EMBEDDING not in weights:
            raise UserError(
                f"Files of the format {self.name} hold an embedding, and the drafter has none of its own. Name the target with --target, for its "
                "embedding."
            )
        replaced = layout.taken_from_target(config)
        if replaced & weights.keys():  # readers cannot be told to take some of these from the target, and others not
            for name in replaced - weights.keys():
                if name in checkpoint.weights:
                    weights[name] = checkpoint.weights[name]
                elif shared is None:
                    raise UserError(
                        f"The format {self.name} takes both embedding and head from the target or neither, and the drafter has a head of its own. "
                        "Name the target with --target, for its embedding."
                    )
                else:
                    weights[name], of_target = Weight.of(shared().embedding), True
        return weights, of_target


def _rows_of(
    rows: Rows, index: Any, weights: Mapping[str, Weight], shared: SharedTensors | None, name: str
) -> torch.Tensor:
    """Rows of the target's table, or of the drafter's own embedding. Raises UserError: the target was not named, or is another."""
    if rows.table == "embedding" and EMBEDDING in weights:
        table = weights[EMBEDDING].tensor()
    elif shared is None:
        raise UserError(
            f"The checkpoint leaves `{name}` to the target: it is the target's {rows.table}, or rows of it. Name the target with --target."
        )
    else:
        table = getattr(shared(), rows.table)
    if int(torch.as_tensor(index).max()) >= len(table):
        raise UserError(
            f"`{name}` should be rows of the {rows.table}, which has {len(table)} rows: too few. The drafter's target is another, or the "
            "checkpoint is damaged."
        )
    found: torch.Tensor = table[index]
    return found


def _equal_but_for_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one of two vectors is the other, or the other in its own dtype."""
    return torch.equal(one, other.to(one.dtype)) or torch.equal(one.to(other.dtype), other)


def _same(one: Weight, other: Weight) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return all(torch.equal(a, b) for a, b in zip(one.parts(), other.parts(), strict=True))
