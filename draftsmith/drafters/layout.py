"""How a format writes a kind of drafter down: a table that is read in both directions.

A conversion that only renames what it knows loses the rest in silence, and the server fills the gap with random numbers. So
a layout is closed: every field of the kind's config has its place, every tensor has its name, and what is left over on
either side is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.run.errors import UserError

EXTRA = "draftsmith"
"""Where `config.json` keeps what a format has no word for: its own readers pass over it."""


@dataclass(frozen=True)
class Source:
    """What a layout reads a config from."""

    record: Mapping[str, Any]
    """`config.json`."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name and shape of every tensor beside it."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """What the target says of fields that the format leaves out (`layer_ids`, `rms_norm_eps`)."""


REQUIRED = object()
_Default = Callable[[Source, dict[str, Any]], Any]


@dataclass(frozen=True)
class Entry:
    """A field of a kind's config and its place in `config.json`."""

    ours: str
    type: type
    theirs: str = ""
    """Dotted path; empty: the same name, at the top."""
    default: Any = REQUIRED
    """What an absent one means: a value, or a function of the source and of the fields before."""
    shift: int = 0
    """Theirs less ours, for numbers and lists of numbers."""

    @property
    def path(self) -> str:
        return self.theirs or self.ours

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)

    def read(self, source: Source, config: dict[str, Any]) -> Any:
        value = look_up(source.record, self.path)
        if value is None:
            value = source.known.get(self.ours)
            if value is not None:
                return value
            if self.default is REQUIRED:
                hint = (
                    " Name the target that the drafter was made for with --target."
                    if self.path.startswith(EXTRA)
                    else ""
                )
                raise UserError(f"The config does not say what `{self.ours}` is (`{self.path}`).{hint}")
            return self.default(source, config) if callable(self.default) else self.default
        return self._checked(value)

    def _checked(self, value: Any) -> Any:
        numbers = value if self.type is tuple else [value]
        wanted: Any = {tuple: int, float: (int, float)}.get(self.type, self.type)
        right = isinstance(numbers, list | tuple) and all(
            isinstance(one, wanted) and (self.type is bool or not isinstance(one, bool)) for one in numbers
        )
        if not right or (self.type is int and not 0 < value < 1 << 31):
            said = {tuple: "a list of whole numbers", int: "a whole number above 0"}.get(self.type, self.type.__name__)
            raise UserError(f"`{self.path}` is {str(value)[:80]!r} in the config, where {said} should be.")
        if self.type is tuple:
            return tuple(one - self.shift for one in value)
        if (
            self.type is float and not 0 <= value < 1000
        ):  # an epsilon, a share: NaN and what is beyond all sense fail here
            raise UserError(f"`{self.path}` is {value} in the config.")
        return float(value) if self.type is float else value

    def write(self, record: dict[str, Any], value: Any) -> None:
        if value is None:  # vLLM takes a null for a value, and fails
            return
        put(record, self.path, [one + self.shift for one in value] if self.type is tuple else value)


def target_fields() -> tuple[Entry, ...]:
    """What only the target decides, and formats of drafters that read its last state leave out."""
    return (Entry("layer_ids", tuple, f"{EXTRA}.layer_ids"), Entry("rms_norm_eps", float, f"{EXTRA}.rms_norm_eps"))


@dataclass(frozen=True)
class Rope:
    """RoPE's settings, of which there are two spellings: `rope_parameters`, and before it `rope_theta` beside `rope_scaling`.

    Both are read; written is the one that the format's own readers know.
    """

    prefix: str = ""
    old: bool = False
    ours: str = "rope_parameters"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.prefix + name for name in ("rope_parameters", "rope_theta", "rope_scaling"))

    def read(self, source: Source, config: dict[str, Any]) -> dict[str, Any]:
        new, theta, scaling = (look_up(source.record, path) for path in self.paths)
        types: tuple[Any, ...] = (dict, (int, float), dict)
        for path, value, wanted in zip(self.paths, (new, theta, scaling), types, strict=True):
            if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
                raise UserError(f"`{path}` is {str(value)[:80]!r} in the config.")
        stated = dict(new or scaling or {})
        kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
        stated.pop("type", None)
        base = next(value for value in (stated.pop("rope_theta", None), theta, 10000.0) if value is not None)
        if not isinstance(kind, str) or type(base) not in (int, float) or not 0 < base < 1e15:
            raise UserError(f"RoPE's settings in the config make no sense: type {kind!r}, theta {base!r}.")
        return {"rope_type": kind, "rope_theta": float(base), **stated}

    def write(self, record: dict[str, Any], value: dict[str, Any]) -> None:
        new, theta, scaling = self.paths
        if not self.old:
            put(record, new, dict(value))
            return
        rest = {name: stated for name, stated in value.items() if name != "rope_theta"}
        put(record, theta, value["rope_theta"])
        put(record, scaling, None if rest == {"rope_type": "default"} else rest)


def same_names(config: Any, ours: tuple[str, ...]) -> dict[str, str]:
    """For formats that call the tensors what we call them."""
    return dict(zip(ours, ours, strict=True))


@dataclass(frozen=True)
class Layout:
    """Config and tensor names of one kind in one format."""

    fields: tuple[Entry | Rope, ...]
    """Every field of the kind's config, in an order in which defaults can be worked out."""
    names: Callable[[Any, tuple[str, ...]], dict[str, str]]
    """Of a config (the kind's own) and our tensor names: theirs to ours. Several of theirs may be copies of one of ours, and
    then only the first must be there."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Written as it is. On reading, another value there is one that this version cannot express."""
    written: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """What follows from the config and is written beside the fields; not read."""
    ignored: frozenset[str] = frozenset()
    """Paths in `config.json` that change nothing of what a drafter computes."""
    only: Mapping[str, tuple[Any, ...] | Callable[[Any], bool]] = field(default_factory=dict)
    """The values of a field that the format can say, or what tells them."""
    maps_vocabulary: bool = False
    """The draft vocabulary may be a part of the target's, with tensors `d2t` and `t2d`."""
    quantizes: bool = False
    """Readers take 8-bit weights, as `quantization_config` says."""

    def read(self, source: Source) -> dict[str, Any]:
        """The kind's config, as `to_dict` gives it.

        Raises:
            UserError: a field is missing, has a value that no such field has, or is not known.
        """
        config: dict[str, Any] = {}
        for each in self.fields:
            config[each.ours] = each.read(source, config)
        for path, value in self.fixed.items():
            found = look_up(source.record, path)
            if found is not None and found != value:
                raise UserError(f"`{path}` is {str(found)[:80]!r} in the config; only {value!r} can be converted.")
        known = {path for each in self.fields for path in each.paths} | {
            *self.fixed,
            *self.written,
            *self.ignored,
            EXTRA,
        }
        if unknown := _unknown(source.record, known, ""):
            raise UserError(
                f"The config has fields whose meaning is not known here: {', '.join(sorted(unknown))}. One of them may "
                "change what the drafter computes; take out those that do not."
            )
        return config

    def check(self, config: Any) -> None:
        """Refuse a config (the kind's own) that the format has no words for.

        Raises:
            UserError: naming the field.
        """
        for name, allowed in self.only.items():
            value = getattr(config, name)
            if not (allowed(value) if callable(allowed) else value in allowed):
                raise UserError(f"it has no words for `{name}: {value}`")

    def write(self, config: Any) -> dict[str, Any]:
        """`config.json` of a config (the kind's own), without its dtype."""
        record: dict[str, Any] = {}
        for path, value in self.fixed.items():
            if value is not None:  # readers take a null for a value
                put(record, path, value)
        for path, follows in self.written.items():
            put(record, path, follows(config))
        for each in self.fields:
            each.write(record, getattr(config, each.ours))
        return record


def look_up(record: Mapping[str, Any], path: str) -> Any:
    """What is at a dotted path; None where nothing is."""
    found: Any = record
    for part in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found


def put(record: dict[str, Any], path: str, value: Any) -> None:
    """Set what is at a dotted path."""
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
        if isinstance(value, Mapping) and any(other.startswith(f"{path}.") for other in known):
            found |= _unknown(value, known, f"{path}.")
        else:
            found.add(path)
    return found
