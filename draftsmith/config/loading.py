"""Load a recipe from its file, with overrides and errors that say what to do."""

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from draftsmith.config.engine_options import KEYS as KEYS_FOR_VLLM
from draftsmith.config.older_forms import method_by_name, problem_of
from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import UserError

RENAMED = {
    "train.accumulate": "train.gradient_accumulation_steps",
    "train.shard": "train.fsdp",
    "train.warmup": "train.warmup_ratio",
    "train.schedule": "train.lr_schedule",
    "train.keep": "train.publish_epoch",
    "train.keep_last": "train.keep_last_epochs",
    "train.more_stores": "train.extra_stores",
    "train.chain_steps": "train.ttt_steps",
    "train.chain_decay": "train.ttt_loss_decay",
    "evaluate.batch_size": "evaluate.acceptance_batch_size",
    "evaluate.batch_sizes": "evaluate.concurrency",
    "evaluate.curve_prompts": "evaluate.step_cost_prompts",
    "evaluate.speed_prompts": "evaluate.timing_prompts",
    "evaluate.speed_tokens": "evaluate.timing_tokens",
    "tune.batch_sizes": "tune.concurrency",
    "serve.options": "serve.vllm_args",
    "plan.hardware.prefill_utilisation": "plan.hardware.prefill_utilization",
    "plan.hardware.decode_utilisation": "plan.hardware.decode_utilization",
    "plan.hardware.train_utilisation": "plan.hardware.train_utilization",
}
"""Keys of earlier versions and their new names."""
_INTERNAL = re.compile(r"\[key\]|[a-z-]+\[.*\]|constrained-\w+", re.DOTALL)
"""What pydantic puts into a location beside keys: that a mapping's key is meant, and which member of a union."""
_NO_METHODS = {
    "extract_hidden_states": "that is what `draftsmith extract RECIPE` does; the layers are `extract.layer_ids`",
}
"""Methods of vLLM's that do not speculate."""


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe from a YAML file, apply overrides (`section.key=value`, values being YAML) and validate it.
    Raises UserError: the file is missing, is not YAML, or does not match the schema."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a recipe. Name the recipe's YAML file; see the ones in recipes/.")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"No recipe at {path}.{hint} A recipe is a YAML file; see the ones in recipes/.")
    try:
        data = _read_yaml(path.read_text())
    except (yaml.YAMLError, _NotYaml) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{path} is not text. A recipe is a YAML file; a model is named in one (`target.model`, `target.gguf`)."
        ) from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must be a YAML mapping with the keys {', '.join(Recipe.model_fields)}.")
    return validated(data, overrides, path=path)


def validated(data: dict[str, Any], overrides: list[str] | None, *, path: Path) -> Recipe:
    """The recipe of these sections, with overrides; paths in it are relative to the folder of `path`, which errors name.
    Raises UserError: it does not match the schema."""
    for override in overrides or []:
        _apply_override(data, override)
    if (problem := problem_of(data)) is not None:
        raise UserError(f"{path} is not a valid recipe: {problem}")
    try:
        return Recipe.model_validate(data, context=path.resolve().parent)
    except ValidationError as error:
        raise UserError(_explain(error, path)) from None


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form, which identifies a stage's inputs."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class _NotYaml(Exception):
    """YAML of which nothing can be made."""


def _read_yaml(text: str) -> Any:
    """A YAML document. What an alias (`*name`) repeats is a copy, so that an override changes the one place that it names.

    Raises:
        yaml.YAMLError, _NotYaml: it is not one, or has a key twice in one mapping, of which PyYAML would take the last in silence.
    """
    try:
        if (node := yaml.compose(text, yaml.SafeLoader)) is not None:
            _refuse_repeated_keys(node)
        return _copied(yaml.safe_load(text))
    except ValueError as error:  # PyYAML's own, as of a date with a thirteenth month
        raise _NotYaml(str(error)) from None
    except (AttributeError, LookupError, TypeError):  # likewise, as of `!!timestamp 3`
        raise _NotYaml("a value is not of the type that its tag (`!!`) says") from None
    except RecursionError:
        raise _NotYaml("an alias is inside of what it repeats") from None


def _refuse_repeated_keys(node: yaml.Node) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise _NotYaml(f"the key `{key.value}` occurs twice in one section, again in line {line}.")
            seen.add(str(key.value))
            _refuse_repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _refuse_repeated_keys(one)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(
            f"`-s {override}` is not an override; write `-s section.key=value`, such as `-s train.epochs=2`."
        )
    try:
        value = _read_yaml(text)
    except (yaml.YAMLError, _NotYaml):
        raise UserError(f"`-s {override}`: the value is not valid YAML.") from None
    *parents, leaf = key.split(".")
    node = data
    for depth, parent in enumerate(parents, 1):
        if node.get(parent) is None:  # not there, or a section without keys
            node[parent] = {}
        child = node[parent]
        if not isinstance(child, dict):
            text = f"`-s {override}`: `{parent}` is a single value in this recipe, not a section."
            if parents[:depth] == ["plan", "hardware"]:
                text += f" Name the preset beside the key: `-s 'plan.hardware={{preset: {child}, {leaf}: {value}}}'`."
            raise UserError(text)
        node = child
    node[leaf] = value


def _explain(error: ValidationError, path: Path) -> str:
    """Describe a schema error in one paragraph: its first problems, each with the nearest known key."""
    problems = []
    # Of a choice of a section or a name, a section is wrong only in itself.
    items = [item for item in error.errors() if not (_is_literal(item["loc"]) and isinstance(item["input"], dict))]
    for item in items[:4]:
        location, _ = _place(item["loc"])
        where = ".".join(location) or "the recipe"
        if (new := RENAMED.get(where)) is not None:
            problems.append(f"`{where}` is now called `{new}`")
        elif item["type"] == "extra_forbidden":
            _, known = _place(item["loc"][:-1])
            problems.append(f"unknown key `{where}` ({_place_for(location, known)})")
        elif item["type"] == "union_tag_invalid":
            context = item["ctx"]
            known = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
            known = [tag for tag in known if not tag.endswith("_mtp")]  # vLLM's older names
            name = context["discriminator"].strip("'")
            hint = _NO_METHODS.get(context["tag"]) or _hint(context["tag"], "known", known)
            problems.append(f"`{where}.{name}` is `{context['tag']}` ({hint})")
        elif item["type"] == "union_tag_not_found":
            name = item["ctx"]["discriminator"].strip("'")
            problems.append(f"`{where}.{name}` is missing{_guess(item['input'])}")
        elif item["type"] == "none_required":
            section = ".".join(location[:-1])
            problems.append(
                f"`{where}` must be left out here. To replace the whole section: `-s '{section}={{kind: ...}}'`"
            )
        elif item["type"] in ("model_type", "dict_type"):
            problems.append(f"`{where}` must be a section (got {item['input']!r:.80})")
        elif item["type"] == "model_attributes_type":  # of the methods alone
            problems.append(f"`{where}` must be a section, as in `{{ method: ngram }}` (got {item['input']!r:.80})")
        elif item["type"] == "tuple_type" and isinstance(item["input"], str | int | float):
            problems.append(f"`{where}` must be a list, as in `-s '{where}=[{item['input']}]'`")
        elif item["type"] == "string_type" and isinstance(item["input"], int | float | date):
            problems.append(
                f"`{where}` must be text (got {item['input']!s:.80}): put it in quotes, as in `-s '{where}=\"...\"'`"
            )
        elif item["type"] == "missing":
            problems.append(f"`{where}` is missing")
        else:
            given = "" if isinstance(item["input"], dict) else f" (got {item['input']!r:.80})"
            problems.append(f"`{where}`: {item['msg'].removeprefix('Value error, ')}{given}")
    return f"{path} is not a valid recipe: {'; '.join(problems)}."


def _place_for(location: Sequence[str], known: Sequence[str]) -> str:
    """What may be meant by an unknown key; of vLLM's arguments of engines, the key that takes their place."""
    *section, name = location
    plain = name.replace("-", "_")
    if section not in ([], ["engine"], ["target"]):
        return _hint(name, "known keys", known)
    if plain in KEYS_FOR_VLLM:
        return f"vLLM's argument is {KEYS_FOR_VLLM[plain]} here"
    hint = _hint(name, "known keys", known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    # In `engine` also where a key is near: one of vLLM's may be spelled like it, as `kv_cache_dtype` and `kv_cache_gib`.
    if section == ["engine"] or not (section or near):
        return f"vLLM's arguments of engines go into `engine.options`; {hint}"
    return hint


def _guess(section: Any) -> str:
    """The method that a section without one may mean, by its model."""
    model = section.get("model") if isinstance(section, dict) else None
    if not isinstance(model, str):
        return ""
    return f"; for `{model}` perhaps `method: {method_by_name(model) or 'draft_model'}`"


def _hint(given: str, what: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else f"{what}: {', '.join(sorted(known))}"


def _is_literal(location: Sequence[str | int]) -> bool:
    return bool(location) and str(location[-1]).startswith("literal[")


def _place(location: Sequence[str | int]) -> tuple[list[str], list[str]]:
    """Return a location as in the recipe, without pydantic's names and tags of union members, and the known keys at it."""
    path: list[str] = []
    models: list[type[BaseModel]] = [Recipe]
    is_key = False  # whether the part is a key of a mapping, not of a section
    for part in map(str, location):
        if not is_key and _INTERNAL.fullmatch(part):
            continue
        tagged = [model for model in models if part in _tags(model)]
        if tagged and not is_key:
            models = tagged
            continue
        path.append(part)
        annotations = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        if annotations and not is_key:
            models = [model for annotation in annotations for model in _models_in(annotation)]
            is_key = any(get_origin(annotation) is dict for annotation in annotations)
        else:
            is_key = False
    return path, sorted({key for model in models for key in model.model_fields})


def _tags(model: type[BaseModel]) -> list[str]:
    """The discriminator values of a member of a union."""
    fields = [model.model_fields[name] for name in ("kind", "method") if name in model.model_fields]
    return [value for field in fields for value in get_args(field.annotation)]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
