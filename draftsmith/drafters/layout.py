"""How a format stores a kind of drafter: a table that is used for reading and for writing.

A conversion that renames only what it knows drops the rest silently, and the server fills the gaps with random numbers. So
a layout is closed: every field of the kind's config has a key in `config.json`, every tensor has a name, and anything left
over on either side is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from draftsmith.run.errors import UserError
from draftsmith.run.weights import Weight

EXTRA = "draftsmith"
"""Section of `config.json` for what a format has no key for; the format's other readers ignore it."""


@dataclass(frozen=True)
class Source:
    """A checkpoint as a layout reads its config from it."""

    record: Mapping[str, Any]
    """`config.json`."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name and shape of every tensor beside it."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """From the target: fields that the format leaves out (`layer_ids`, `rms_norm_eps`)."""


REQUIRED = object()


@dataclass(frozen=True)
class Entry:
    """A field of a kind's config and its key in `config.json`."""

    field: str
    type: type
    key: str = ""
    """Dotted path; empty: the field's name, at the top level."""
    default: Any = REQUIRED
    """Value of an absent key, or a function of the source and the preceding fields that returns it."""
    shift: int = 0
    """For lists of numbers: the key's value minus the field's."""
    other_keys: tuple[str, ...] = ()
    """Dotted paths that are looked up where the key is absent, in this order; they are not written."""
    left_out: Any = None
    """A value that is not written, as None is not: to the format's readers an absent key means it, and the key may mean more."""
    least: int = 1
    """The smallest value of a whole number: 0 for token ids, which begin with it."""

    @property
    def path(self) -> str:
        return self.key or self.field

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.other_keys)

    def read(self, source: Source, config: dict[str, Any]) -> Any:
        for path in self.paths:
            value = look_up(source.record, path)
            left_out = self.type is tuple and value == []  # vLLM takes an empty list for an absent key
            if value is not None and not left_out:
                return self._checked(value, path)
        # The target's last: it says what is usual, and the config what this drafter was trained with.
        value = source.known.get(self.field)
        if value is not None:
            return value
        if self.default is REQUIRED:
            hint = " Name the drafter's target with --target." if self.path.startswith(EXTRA) else ""
            raise UserError(f"The config does not say what `{self.field}` is (`{self.path}`).{hint}")
        return self.default(source, config) if callable(self.default) else self.default

    def _checked(self, value: Any, path: str) -> Any:
        numbers = value if self.type is tuple else [value]
        wanted: Any = {tuple: int, float: (int, float)}.get(self.type, self.type)
        right = isinstance(numbers, list | tuple) and all(
            isinstance(one, wanted) and (self.type is bool or not isinstance(one, bool)) for one in numbers
        )
        if not right or (self.type is int and not self.least <= value < 1 << 31):
            number = f"a whole number from {self.least} on"
            said = {tuple: "a list of whole numbers", int: number}.get(self.type, self.type.__name__)
            raise UserError(f"`{path}` is {str(value)[:80]!r} in the config, where {said} should be.")
        if self.type is tuple:
            return tuple(one - self.shift for one in value)
        if self.type is float and not 0 <= value < 1000:  # an epsilon or a share: NaN and nonsense fail here
            raise UserError(f"`{path}` is {value} in the config.")
        return float(value) if self.type is float else value

    def write(self, record: dict[str, Any], value: Any) -> None:
        if value is None or value is self.left_out:  # vLLM fails on null
            return
        put(record, self.path, [one + self.shift for one in value] if self.type is tuple else value)


def target_fields() -> tuple[Entry, ...]:
    """Fields that only the target determines, and that formats of drafters on its last hidden state leave out."""
    return (Entry("layer_ids", tuple, f"{EXTRA}.layer_ids"), Entry("rms_norm_eps", float, f"{EXTRA}.rms_norm_eps"))


@dataclass(frozen=True)
class Rope:
    """RoPE's settings, in either spelling: `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

    Both are read; the one that the format's other readers know is written. Two types have older names, `su` and, with its sections,
    `mrope`, which are replaced as in vLLM (`patch_legacy_rope_type` in vllm/transformers_utils/config.py).
    """

    prefix: str = ""
    old: bool = False
    field: str = "rope_parameters"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.prefix + name for name in ("rope_parameters", "rope_theta", "rope_scaling"))

    def read(self, source: Source, config: dict[str, Any]) -> dict[str, Any]:
        new, theta, scaling = (look_up(source.record, path) for path in self.paths)
        types: tuple[Any, ...] = (dict, (int, float), dict)
        for path, value, wanted in zip(self.paths, (new, theta, scaling), types, strict=True):
            if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
                raise UserError(f"`{path}` is {str(value)[:80]!r} in the config.")
        readings = [self._normalized(stated, theta) for stated in (new, scaling) if stated]
        if len(readings) == 2 and readings[0] != readings[1]:
            raise UserError(
                f"The config has RoPE's settings twice, and they differ: `{self.paths[0]}` is {str(new)[:200]}, and `{self.paths[2]}` "
                f"{str(scaling)[:200]}, of which transformers and vLLM take the latter. Remove the one that the drafter was not trained with."
            )
        return readings[0] if readings else self._normalized({}, theta)

    @staticmethod
    def _normalized(section: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
        """`rope_parameters` from a section of either spelling and the `rope_theta` beside it."""
        stated = dict(section)
        kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
        stated.pop("type", None)
        base = next(value for value in (stated.pop("rope_theta", None), theta, 10000.0) if value is not None)
        if not isinstance(kind, str) or type(base) not in (int, float) or not 0 < base < 1e15:
            raise UserError(f"RoPE's settings in the config make no sense: type {kind!r}, theta {base!r}.")
        if kind == "su":
            kind = "longrope"
        elif kind == "mrope" and "mrope_section" in stated:
            kind = "default"
        if kind != "default":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes seconds

            if kind not in ROPE_INIT_FUNCTIONS:
                raise UserError(
                    f"The config's type of RoPE is {kind[:80]!r}; only default, {', '.join(ROPE_INIT_FUNCTIONS)} are implemented."
                )
        return {"rope_type": kind, "rope_theta": float(base), **stated}

    def write(self, record: dict[str, Any], value: dict[str, Any]) -> None:
        new, theta, scaling = self.paths
        if not self.old:
            put(record, new, dict(value))
            return
        rest = {name: stated for name, stated in value.items() if name != "rope_theta"}
        put(record, theta, value["rope_theta"])
        put(record, scaling, None if rest == {"rope_type": "default"} else rest)


FULL, SLIDING = "full_attention", "sliding_attention"
"""Of `layer_types`: a layer that sees the whole context, and one with a window."""


@dataclass(frozen=True)
class Window:
    """The sliding window that all layers have or none, as configs of Qwen and Llama say it: its size, whether it is used, and the type of
    each layer.

    Args:
        prefix: of the keys.
        types: `layer_types` is also written where no layer has a window, as in configs of Qwen3.
    """

    prefix: str = ""
    types: bool = False
    field: str = "sliding_window"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.prefix + name for name in ("sliding_window", "use_sliding_window", "layer_types"))

    def read(self, source: Source, config: dict[str, Any]) -> int | None:
        size, used, types = (look_up(source.record, path) for path in self.paths)
        of_size, of_use, of_types = self.paths
        if types is None:
            # A size alone is used by some readers and not by others, and without types, so is `use_sliding_window`.
            if used not in (None, False) or (size is not None and used is None):
                path, value = (of_size, size) if used is None else (of_use, used)
                raise UserError(
                    f"`{path}` is {str(value)[:80]!r} in the config, which does not say which layers have a sliding window (`{of_types}`)."
                )
            return None
        if not isinstance(types, list) or any(each not in (FULL, SLIDING) for each in types):
            raise UserError(
                f"`{of_types}` is {str(types)[:80]!r} in the config; only {FULL} and {SLIDING} are implemented."
            )
        if SLIDING not in types:
            return None
        if FULL in types or len(types) != config["num_layers"]:
            raise UserError(
                f"`{of_types}` is {str(types)[:80]!r} in the config, for {config['num_layers']} layers. Only drafters whose layers all have a "
                "sliding window, or none of them, are implemented."
            )
        if type(size) is not int or not 0 < size < 1 << 31 or used is False:
            raise UserError(
                f"The config's layers have a sliding window (`{of_types}`), and it does not say how long it is: `{of_size}` is "
                f"{str(size)[:80]!r}, `{of_use}` {str(used)[:80]!r}."
            )
        return size

    def write(self, record: dict[str, Any], value: int | None) -> None:
        size, used, types = self.paths
        put(record, used, value is not None)
        if value is not None:
            put(record, size, value)
        if value is not None or self.types:
            layers = int(look_up(record, self.prefix + "num_hidden_layers"))
            put(record, types, [FULL if value is None else SLIDING] * layers)


def same_names(config: Any, tensors: tuple[str, ...]) -> dict[str, str]:
    """`Layout.names` of a format that names tensors as the kind's module does."""
    return dict(zip(tensors, tensors, strict=True))


@dataclass(frozen=True)
class Rows:
    """A tensor of a kind that a format leaves out where it is rows of one of the target's tables."""

    table: Literal["embedding", "lm_head"]
    """The target's; of the embedding, the drafter's own if it has one."""
    which: Callable[[Any, torch.Tensor], Any]
    """Index of the rows, from the kind's config and the draft token ids; None where the format always stores the tensor."""
    otherwise: Literal["stored", "in_embedding", "refused"]
    """What is written for values other than the table's: the tensor itself, a separate embedding with these rows, or an error."""


@dataclass(frozen=True)
class EightBits:
    """What a format's readers take of 8-bit weights, as described by `quantization_config`: those of all linear layers but some."""

    but: tuple[str, ...] = ()
    """Modules that stay in floating point, by the last part of their names."""
    but_of_weights: tuple[str, ...] = ()
    """Further ones where only weights are rounded and not inputs too."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of `config.json` of a checkpoint with such weights."""

    def floating(self, *, rounds_inputs: bool) -> tuple[str, ...]:
        """Modules that stay in floating point, by the last part of their names, in a scheme that rounds inputs or does not."""
        return self.but if rounds_inputs else self.but + self.but_of_weights


@dataclass(frozen=True)
class Layout:
    """Config and tensor names of one kind in one format."""

    fields: tuple[Entry | Rope | Window, ...]
    """Every field of the kind's config; defaults may use fields before theirs."""
    names: Callable[[Any, tuple[str, ...]], dict[str, str]]
    """Takes the kind's config and the names of its tensors; returns the format's names, each with the kind's. If several of
    the format's names are copies of one tensor, only the first is required."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys with one value: written as they are; another value on reading is an error, but for a `sliding_window` that
    `use_sliding_window: false` beside it turns off."""
    derived: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Keys that are computed from the config on writing, and not read."""
    irrelevant: frozenset[str] = frozenset()
    """Keys of `config.json` that do not affect what a drafter computes."""
    supported: Mapping[str, tuple[Any, ...] | Callable[[Any], bool]] = field(default_factory=dict)
    """By field: the values that the format can express, or a function that tells whether it can express one."""
    maps_vocabulary: bool = False
    """The draft vocabulary may be a subset of the target's, given by the tensors `d2t` and `t2d`."""
    eight_bits: EightBits | None = None
    """None where the format's readers take no 8-bit weights."""
    further_files: Mapping[str, Callable[[Any, Mapping[str, Weight]], bytes]] = field(default_factory=dict)
    """Files beside the tensors, by name: what is in each, from the kind's config and the stored tensors. Of such
    files only DFlash's mask is read, where no tensor has it."""
    refused: tuple[Callable[[Source], str | None], ...] = ()
    """Each says what a checkpoint of the format computes that the kind's module does not; None for nothing."""
    shared: Mapping[str, Rows] = field(default_factory=dict)
    """Tensors of the kind, by name, that the format leaves to the target."""
    has_embedding: bool = True
    """A drafter may have an embedding of its own, if its kind may."""
    wants_embedding: bool = False
    """The format's own reader needs an embedding in the file, the target's if the drafter has none of its own."""
    needs_embedding: bool = False
    """Likewise, and without one a drafter is not written."""
    whole_vocabulary: bool = False
    """The format's readers take drafters over the target's whole vocabulary only."""
    inexpressible: Callable[[Any], str | None] = lambda _: None
    """What of a kind's config the format cannot express together, where it can express each field."""
    taken_from_target: Callable[[Any], frozenset[str]] = lambda _: frozenset()
    """Stored tensors that the format's readers replace by those of the target that the config names, by the kind's config: where a drafter has
    its own, the target is not named."""

    def read(self, source: Source) -> dict[str, Any]:
        """Return the kind's config as a dict of its fields.
        Raises UserError: a field is missing or invalid, a key is unknown, or the kind's module does not compute the same."""
        for reason in self.refused:
            if (why := reason(source)) is not None:
                raise UserError(f"It cannot be converted: {why}.")
        config: dict[str, Any] = {}
        for each in self.fields:
            config[each.field] = each.read(source, config)
        for path, value in self.fixed.items():
            found = look_up(source.record, path)
            if found is not None and found != value and not _is_switched_off(source.record, path):
                raise UserError(f"`{path}` is {str(found)[:80]!r} in the config; only {value!r} can be converted.")
        paths = (path for each in self.fields for path in each.paths)
        known = {*paths, *self.fixed, *self.derived, *self.irrelevant, EXTRA}
        if unknown := _unknown(source.record, known, ""):
            raise UserError(
                f"The config has unknown fields, which may change what the drafter computes: {', '.join(sorted(unknown))}. "
                "Remove those that do not."
            )
        return config

    def check(self, config: Any) -> None:
        """Check that the format can express a config of the kind.
        Raises UserError: naming the field that it cannot express."""
        for name, allowed in self.supported.items():
            value = getattr(config, name)
            if not (allowed(value) if callable(allowed) else value in allowed):
                raise UserError(f"it cannot express `{name}: {value}`")
        if (what := self.inexpressible(config)) is not None:
            raise UserError(f"it cannot express {what}")
        if self.whole_vocabulary and config.draft_vocab_size != config.vocab_size:
            raise UserError("its readers draft from the target's whole vocabulary, and this drafter has one of its own")

    def write(self, config: Any) -> dict[str, Any]:
        """Return `config.json` for the kind's config, without the dtype."""
        record: dict[str, Any] = {}
        for path, value in self.fixed.items():
            if value is not None:  # readers take null as a value
                put(record, path, value)
        for path, value_of in self.derived.items():
            put(record, path, value_of(config))
        for each in self.fields:
            each.write(record, getattr(config, each.field))
        return record


def _is_switched_off(record: Mapping[str, Any], path: str) -> bool:
    """Whether the key is the size of a sliding window that its config does not use: those of Qwen2 have both keys."""
    section, dot, name = path.rpartition(".")
    return name == "sliding_window" and look_up(record, f"{section}{dot}use_sliding_window") is False


def look_up(record: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    found: Any = record
    for part in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found


def put(record: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path."""
    *sections, last = path.split(".")
    for section in sections:
        record = record.setdefault(section, {})
    record[last] = value


def _unknown(record: Mapping[str, Any], known: set[str], prefix: str) -> set[str]:
    found: set[str] = set()
    for name, value in record.items():
        path = prefix + str(name)
        if path in known:
            continue
        if isinstance(value, Mapping | None) and any(other.startswith(f"{path}.") for other in known):
            found |= _unknown(value or {}, known, f"{path}.")
        else:
            found.add(path)
    return found
