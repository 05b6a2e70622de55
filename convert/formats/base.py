"""What a format is: for each kind of drafter that it can hold, a layout; and reading and writing by it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.convert.contents import EMBEDDING, UNKNOWN_TARGET, DraftCheckpoint
from draftsmith.convert.quantize import dequantized, quantized
from draftsmith.convert.vocabulary import MAPS, from_tensors, to_tensors
from draftsmith.convert.weights import Weight, listed, open_weights, read_json, write_safetensors
from draftsmith.drafters import drafter_class
from draftsmith.drafters.layout import EXTRA, Layout, Source, look_up, put
from draftsmith.run.atomic_io import write_json
from draftsmith.run.errors import UserError


@dataclass(frozen=True)
class Format:
    """A published format."""

    name: str
    title: str
    """One line, for `draftsmith convert --list`."""
    layouts: Mapping[str, Layout]
    """By kind of drafter."""
    recognize: Callable[[Mapping[str, Any], Collection[str]], tuple[str, str] | None]
    """Of `config.json` and the tensors' names: the kind, and what gives it away; None where it is another format."""
    target_name: str = ""
    """Path in `config.json` of the target's name or Hub id, where the format has one."""
    weights_file: str = "model.safetensors"
    """What its readers open."""

    def read(
        self, directory: Path, kind: str, *, target: Mapping[str, Any], known: Mapping[str, Any]
    ) -> DraftCheckpoint:
        """A checkpoint of this format.

        Args:
            directory: with `config.json` and the tensors.
            kind: of drafter.
            target: name, revision and config_hash, where the user named it; else `UNKNOWN_TARGET`.
            known: what the target says of fields that the format leaves out.

        Raises:
            UserError: something of it is missing, unknown or contradictory.
        """
        layout = self.layouts[kind]
        record, weights = dequantized(read_json(directory / "config.json"), open_weights(directory))
        source = Source(record, {name: weight.shape for name, weight in weights.items()}, known)
        fields = layout.read(source)
        config = DraftCheckpoint(kind, fields, torch.empty(0), {}, {}).drafter_config()
        ids = torch.arange(config.draft_vocab_size)
        if layout.maps_vocabulary:
            maps = {name: weights.pop(name).tensor() for name in MAPS if name in weights}
            ids, order = from_tensors(maps, vocabulary=config.vocab_size, size=config.draft_vocab_size)
            if order is not None and "lm_head.weight" in weights:
                weights["lm_head.weight"] = weights["lm_head.weight"].rows(order)
        ours = self._by_our_names(kind, config, weights, tied=bool(record.get("tie_word_embeddings")))
        own = look_up(record, f"{EXTRA}.target")
        named = look_up(record, self.target_name) if self.target_name else None
        if target["name"] is not None:
            whose = dict(target)
        elif isinstance(own, Mapping) and UNKNOWN_TARGET.keys() <= own.keys():
            whose = dict(own)
        else:
            whose = UNKNOWN_TARGET | ({"name": named} if isinstance(named, str) else {})
        training = look_up(record, f"{EXTRA}.training")
        return DraftCheckpoint(
            kind, config.to_dict(), ids, ours, whose, dict(training) if isinstance(training, Mapping) else {}
        ).check()  # fmt: skip

    def _by_our_names(self, kind: str, config: Any, weights: Mapping[str, Weight], *, tied: bool) -> dict[str, Weight]:
        shapes = drafter_class(kind).shapes(config)
        names = self.layouts[kind].names(config, tuple(shapes))
        if drafter_class(kind).has_embedding:
            names = {**names, EMBEDDING: EMBEDDING}
        if unknown := sorted(weights.keys() - names.keys()):
            raise UserError(
                f"No place is known in a drafter of the kind {kind} for {listed(unknown)}. "
                "Dropping them could change what it computes; it was not converted."
            )
        ours: dict[str, Weight] = {}
        for theirs, name in names.items():
            if theirs not in weights:
                continue
            if name in ours and not _same(ours[name], weights[theirs]):
                raise UserError(
                    f"{theirs} should be a copy of another step's, and is not, although the weights are tied."
                )
            ours.setdefault(name, weights[theirs])
        if tied and "lm_head.weight" in shapes and EMBEDDING in ours:
            ours.setdefault("lm_head.weight", ours[EMBEDDING])
        if missing := sorted(shapes.keys() - ours.keys()):
            theirs_of = {name: theirs for theirs, name in reversed(names.items())}
            raise UserError(
                f"The checkpoint lacks {listed([theirs_of[name] for name in missing])}. It is incomplete or of another "
                "format; nothing was made up in their place."
            )
        return ours

    def write(
        self, contents: DraftCheckpoint, directory: Path, *, dtype: str | None = None, quantize: str | None = None
    ) -> int:
        """Write the checkpoint into `directory`, `config.json` last; returns the bytes of its tensors.

        Args:
            contents: of a kind that the format holds.
            directory: exists.
            dtype: torch's name of the floating-point type; None for that of the source.
            quantize: linear layers' weights in 8 bits, one of `quantize.SCHEMES`.

        Raises:
            UserError: the format has no words for the drafter, or its readers take no such weights.
        """
        record, weights = self.written(contents, dtype=dtype)
        if quantize is not None:
            if not self.layouts[contents.kind].quantizes:
                able = [f"{kind}" for kind, layout in self.layouts.items() if layout.quantizes]
                raise UserError(
                    f"Readers of the format {self.name} take 8-bit weights in drafters of the kind "
                    f"{', '.join(able) or '(none)'}, and this is a drafter of the kind {contents.kind}. Leave --quantize out"
                    f"{'' if able else ', or write the format vllm'}."
                )
            record, weights = quantized(record, weights, quantize)
        size = write_safetensors(directory / self.weights_file, weights)
        write_json(directory / "config.json", record)
        return size

    def written(
        self, contents: DraftCheckpoint, *, dtype: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Weight]]:
        """`config.json` and the tensors that `write` writes."""
        layout = self.layouts.get(contents.kind)
        if layout is None:
            raise UserError(
                f"The format {self.name} holds drafters of the kind {', '.join(self.layouts)}, and this one is of the kind "
                f"{contents.kind}."
            )
        config = contents.drafter_config()
        try:
            layout.check(config)
        except UserError as error:
            raise UserError(f"The format {self.name} cannot hold this drafter: {error}.") from None
        names = layout.names(config, tuple(name for name in contents.weights if name != EMBEDDING))
        ours = contents.to(dtype).weights
        weights = {theirs: ours[name] for theirs, name in names.items()}
        if EMBEDDING in ours:
            weights[EMBEDDING] = ours[EMBEDDING]
        types = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()})
        if layout.maps_vocabulary:
            weights |= to_tensors(contents.draft_token_ids, vocabulary=config.vocab_size)
        record = layout.write(config)
        if self.target_name and contents.target["name"]:
            put(record, self.target_name, contents.target["name"])
        extra = record.setdefault(EXTRA, {})
        extra |= {"kind": contents.kind, "target": contents.target, "training": contents.training}
        return record | {"torch_dtype": types[0] if len(types) == 1 else "float32"}, weights


def _same(one: Weight, other: Weight) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return all(torch.equal(a, b) for a, b in zip(one.parts(), other.parts(), strict=True))
