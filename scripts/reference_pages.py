"""Write the reference pages of the site from the code: recipe keys, commands, `results.json`.

    python scripts/reference_pages.py docs/reference

Needs Draftsmith installed; imports neither torch nor vLLM. `make docs` runs it before it builds the site.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftsmith.cli import app
from draftsmith.config.loading import RENAMED
from draftsmith.config.recipe import Recipe

SCHEMA = Path(__file__).parents[1] / "serve" / "evaluation" / "schema.py"
WORDS = {str: "text", int: "integer", float: "number", bool: "true or false"}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in (("recipe", recipe_page()), ("cli", cli_page()), ("results", results_page())):
        (folder / f"{name}.md").write_text(page)


def attribute_docstrings(source: str) -> dict[str, str]:
    """The string below each annotated attribute of the first class in `source`, by attribute name."""
    (node,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)][:1]
    return {name: text for name, _, text in _attributes(node)}


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr, str]]:
    for statement, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            yield statement.target.id, statement.annotation, below.value.value if documented else ""  # type: ignore[union-attr]


def prose(text: str | None) -> str:
    """A docstring as one line of Markdown for each paragraph."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return text.replace("(docs/log.md)", "([log of experiments](../log.md))").replace("<", "&lt;")


def _entry(name: str, facts: str, text: str | None) -> str:
    """An item of a definition list."""
    if not text:
        return f"`{name}`\n:   {facts}"
    return f"`{name}` <small>{facts}</small>\n:   {textwrap.indent(prose(text), '    ').lstrip()}"


# ---- recipe ----


def recipe_page() -> str:
    sections = dict(_sections("", Recipe))
    lines = [
        "# Recipe reference",
        "A recipe is one YAML file that describes a whole run. Unknown keys are errors. Relative paths are relative to the "
        "recipe. `-s section.key=value` overrides any value on the command line. This page is generated from "
        "`draftsmith/config/`.",
    ]
    names = {model: path for path, model in reversed(sections.items())}
    for path, model in sections.items():
        if names[model] != path:  # described where it is met first
            continue
        lines += [f"## `{path}` {{#{_anchor(path)}}}" if path else "## Top level", prose(model.__doc__)]
        lines += [_key(name, field, model, names) for name, field in model.model_fields.items()]
    lines += [
        "## Renamed keys",
        "Keys of earlier versions. A recipe that uses one is refused, and the error names the new key.",
    ]
    lines.append("\n".join(["| old | new |", "|---|---|", *(f"| `{old}` | `{new}` |" for old, new in RENAMED.items())]))
    return "\n\n".join(lines) + "\n"


def _sections(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section below `model` with its path, in the order of the keys; `NAME` stands for a free key, `[]` for a list's items."""
    yield path, model
    for name, field in model.model_fields.items():
        inner = f"{path}.{name}".lstrip(".")
        for place, found in _models(field.annotation):
            tag = next(
                (get_args(field.annotation) for key, field in found.model_fields.items() if _chooses(key, field)), ()
            )
            tag = tuple(name for name in tag if not name.endswith("_mtp"))  # vLLM's older names
            yield from _sections(f"{inner}{place}" + (f" ({', '.join(tag)})" if tag else ""), found)


def _chooses(name: str, field: FieldInfo) -> bool:
    """Whether sections of a union are told apart by this key."""
    return name in ("kind", "method") and get_origin(field.annotation) is Literal


def _models(annotation: Any, place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield place, annotation
        return
    if get_origin(annotation) is dict:
        place += ".NAME"
    elif get_origin(annotation) is tuple:
        place += "[]"
    for part in get_args(annotation):
        yield from _models(part, place)


def _anchor(path: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", path.lower()).strip("-")


@cache
def _documented(model: type[BaseModel]) -> dict[str, str]:
    """Docstrings of a section's keys, those that it inherits too."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            written = attribute_docstrings(textwrap.dedent(inspect.getsource(base)))
            found |= {key: text for key, text in written.items() if text}
    return found


def _key(name: str, field: FieldInfo, model: type[BaseModel], names: dict[type[BaseModel], str]) -> str:
    kind = " or ".join(dict.fromkeys(_type(field.annotation, names)))
    kind += "".join(f", {limit}" for limit in _limits(field.metadata))
    facts = [kind, "required" if field.is_required() else _default(field)]
    sections = [found for _, found in _models(field.annotation)]
    text = _documented(model).get(name)
    if not text:
        text = "Chooses this section." if _chooses(name, field) else sections[0].__doc__ if len(sections) == 1 else None
    return _entry(name, "; ".join(filter(None, facts)), text)


def _type(annotation: Any, names: dict[type[BaseModel], str]) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (NoneType, Any):
        if annotation is Any:
            yield "any value"
    elif origin is Literal:
        yield from (f"`{value}`" for value in arguments)
    elif origin is Annotated:
        limits = [limit for data in arguments[1:] for limit in _limits([data, *getattr(data, "metadata", ())])]
        yield from (", ".join([kind, *limits]) for kind in _type(arguments[0], names))
    elif origin in (UnionType, Union):
        for part in arguments:
            yield from _type(part, names)
    elif origin is tuple:
        inner = arguments[:1] if Ellipsis in arguments else arguments
        yield "list of " + ", ".join(" or ".join(_type(part, names)) for part in inner)
    elif origin is dict:
        yield f"map from {' or '.join(_type(arguments[0], names))} to {' or '.join(_type(arguments[1], names))}"
    elif annotation in names:
        tag = names[annotation].partition(" (")[2].removesuffix(")")
        yield f"[{tag or 'section'}](#{_anchor(names[annotation])})"
    else:
        yield WORDS.get(annotation, str(annotation))


def _limits(metadata: list[Any]) -> Iterator[str]:
    words = {
        "ge": "at least {}",
        "gt": "above {}",
        "le": "at most {}",
        "lt": "below {}",
        "min_length": "at least {} of them",
    }
    for data in metadata:
        for name, text in words.items():
            if (value := getattr(data, name, None)) is not None:
                yield text.format(value)
        if pattern := getattr(data, "pattern", None):
            yield f"matching `{pattern}`"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None:
        return "optional"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, tuple | list):
        return f"default `[{', '.join(map(str, value))}]`"
    if isinstance(value, dict):
        return f"default: {', '.join(f'`{key}`' for key in value)}" if value else "default: none"
    return f"default `{str(value).lower() if isinstance(value, bool) else value}`"


# ---- commands ----


def cli_page() -> str:
    lines = [
        "# Command-line reference",
        "Exit status: 0 success, 1 failure, 2 a mistake in the input, 130 interrupted; other values are named at their command. "
        "Messages go to standard error, results to standard output. This page is generated from the commands.",
    ]
    command = typer.main.get_command(app)
    for name, found in command.commands.items():  # type: ignore[attr-defined]
        lines += list(_command(f"draftsmith {name}", found))
    return "\n\n".join(lines) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for inner, found in command.commands.items():
            yield from _command(f"{name} {inner}", found)
        return
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    yield f"## `{name}`"
    words = [str(parameter.metavar or parameter.name).upper() for parameter in arguments]
    words = [word if parameter.required else f"[{word}]" for word, parameter in zip(words, arguments, strict=True)]
    yield f"```text\n{' '.join([name, '[OPTIONS]', *words])}\n```"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        text = " ".join(paragraph.split())
        yield f"```bash\n{text}\n```" if text.startswith("draftsmith ") else prose(text)
    rows = []
    for parameter, word in [*zip(arguments, words, strict=True)]:
        rows.append((f"`{word}`", parameter))
    for parameter in shown:
        if parameter.param_type_name == "option":
            value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
            rows.append(
                (", ".join(f"`{option}`" for option in [*parameter.opts[:-1], parameter.opts[-1] + value]), parameter)
            )
    table = ["| argument | meaning |", "|---|---|"]
    for names, parameter in rows:
        notes = [prose(getattr(parameter, "help", None))]
        if (
            not parameter.required
            and not getattr(parameter, "is_flag", False)
            and parameter.default not in (None, [], ())
        ):
            notes.append(f"Default: `{parameter.default}`.")
        if getattr(parameter, "envvar", None):
            notes.append(f"Environment: `{parameter.envvar}`.")
        table.append(f"| {names} | {' '.join(notes)} |".replace("\n", " "))
    if rows:
        yield "\n".join(table)


# ---- results.json ----


def results_page() -> str:
    classes: dict[str, ast.ClassDef] = {}
    aliases: dict[str, str] = {}
    for node in ast.parse(SCHEMA.read_text()).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            aliases[node.targets[0].id] = ast.unparse(node.value)
    lines = [
        "# results.json",
        "What `draftsmith evaluate` measured, in `runs/NAME/eval/results.json`. Figures are as measured: nothing is rounded and no "
        "outlier is removed. An interval is the two ends of a 95% confidence interval. This page is generated from "
        "`serve/evaluation/schema.py`.",
    ]
    waiting, seen = ["Results"], {"Results"}
    while waiting:
        name = waiting.pop(0)
        node = classes[name]
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        title, text = (name, prose(ast.get_docstring(node))) if name != "Results" else ("Top level", "The whole file.")
        lines += [f"## {title} {{#{name.lower()}}}", text]
        if bases:
            lines.append(f"Has the keys of {', '.join(f'[{base}](#{base.lower()})' for base in bases)}, and:")
        for key, annotation, text in _attributes(node):
            used = [word for word in re.findall(r"\w+", ast.unparse(annotation)) if word in classes]
            waiting += [word for word in used if word not in seen]
            seen |= set(used)
            if not text and used:
                text = ast.get_docstring(classes[used[0]]) or ""
            lines.append(_entry(key, _json_type(annotation, classes, aliases), text))
        waiting += [base for base in bases if base not in seen]
        seen |= set(bases)
    return "\n\n".join(lines) + "\n"


def _json_type(annotation: ast.expr, classes: dict[str, ast.ClassDef], aliases: dict[str, str]) -> str:
    words = {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
        "None": "null",
        "Any": "anything",
    }
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        parts = [_json_type(part, classes, aliases) for part in inner]
        match ast.unparse(annotation.value):
            case "list":
                return f"list of {parts[0]}"
            case "dict":
                return f"object of {parts[1]}"
            case "NotRequired":
                return f"{parts[0]}; may be absent"
    if isinstance(annotation, ast.BinOp):
        return f"{_json_type(annotation.left, classes, aliases)} or {_json_type(annotation.right, classes, aliases)}"
    name = ast.unparse(annotation)
    if name in classes:
        return f"[{name}](#{name.lower()})"
    if name == "Interval":
        return "interval"
    if name in aliases:
        return _json_type(ast.parse(aliases[name], mode="eval").body, classes, aliases)
    return words.get(name, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
