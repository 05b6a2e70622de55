"""Commands that take the place of `vllm serve`: whoever types one of vLLM's own options is told what to type here."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from draftsmith.config.older_forms import GONE, OLDER, WHOLE, todays_method
from draftsmith.config.sampling_options import SamplingOptions
from draftsmith.run.errors import UserError

SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        "--speculative_config",
        metavar="JSON",
        help="vLLM's own: how to speculate, as in `serve.method` and in its place.",
        show_default=False,
    ),
]

_ELSEWHERE = {
    "model": "target.model", "tokenizer": "target.model", "revision": "target.revision", "dtype": "target.dtype",
    "trust-remote-code": "target.trust_remote_code", "max-model-len": "engine.max_model_len",
    "tensor-parallel-size": "engine.tensor_parallel_size", "gpu-memory-utilization": "engine.gpu_memory_utilization",
    "enforce-eager": "engine.enforce_eager",
}  # fmt: skip
"""vLLM's options and the recipe's keys for them. Parameters of sampling are in `sampling` or in requests, and all others are keys of
`serve.vllm_args` or `engine.options`."""
_FOR_EVERY_ENGINE = {
    "quantization", "kv-cache-dtype", "enable-expert-parallel", "distributed-executor-backend", "async-scheduling", "hf-overrides",
    "load-format", "config-format", "tokenizer-mode",
}  # fmt: skip
"""Options that what is extracted should share with what is served: in `engine.options`, whatever the command."""
_SHORT = {
    "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-ep": "enable-expert-parallel",
    "-q": "quantization", "-sm": "spec-model", "-st": "spec-tokens", "-sc": "speculative-config",
}  # fmt: skip


class VllmCommand(TyperCommand):
    """A command in whose place people type options of `vllm serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)}
        foreign = dict(_foreign_options(args, own | {"--help"}))
        if foreign:
            raise UserError(what_to_type(foreign, serves=self.name == "serve"))
        return super().parse_args(ctx, args)


def with_speculative_config(overrides: list[str] | None, speculative_config: str | None) -> list[str]:
    """The recipe's overrides with those of `--speculative-config`.

    Raises:
        UserError: it is not a JSON object.
    """
    if speculative_config is None:
        return list(overrides or [])
    try:
        value = json.loads(speculative_config)
    except ValueError as error:
        raise UserError(f"`--speculative-config {speculative_config}` is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError('`--speculative-config` takes a JSON object, as in \'{"method": "ngram"}\'.')
    return [*(overrides or []), f"serve.method={json.dumps(_with_method(value))}"]


def what_to_type(foreign: dict[str, str], *, serves: bool) -> str:
    """What to type here instead of some of vLLM's options.

    Args:
        foreign: names, without dashes before them, and values, as typed.
        serves: whether the command is `serve`, and not `generate`.
    """
    others = "serve.vllm_args" if serves else "engine.options"
    speculation: dict[str, Any] = {}
    settings, gone, of_requests = [], [], []
    for name, value in foreign.items():
        plain = name.replace("-", "_")
        part = plain.removeprefix(f"{WHOLE}.")
        if part != plain:
            speculation.setdefault(WHOLE, {})[part] = _value(value)
        elif plain in OLDER or plain == WHOLE:
            speculation[plain] = value if plain == WHOLE else _value(value)
        elif plain in GONE:
            gone.append(f"--{name}")
        elif serves and plain in SamplingOptions.model_fields and plain != "seed":
            of_requests.append(f"--{name}")
        else:
            if plain.startswith("no_") and value == "true":
                name, plain, value = name[3:], plain[3:], "false"
            option = name.replace("_", "-")
            section = "engine.options" if option in _FOR_EVERY_ENGINE else others
            if not serves and plain in SamplingOptions.model_fields:
                section = "sampling"
            key = _ELSEWHERE.get(option, f"{section}.{plain}")
            settings.append(f"-s {shlex.quote(f'{key}={value}')}")
    if {OLDER.get(name) for name in speculation} == {"num_speculative_tokens"}:
        settings.append(f"-k {shlex.quote(str(next(iter(speculation.values()))))}")
    elif speculation:
        settings.append(f"-s {shlex.quote(f'serve.method={json.dumps(todays_method(speculation))}')}")
    named = ", ".join(f"--{name}" for name in foreign)
    if len(of_requests) == len(foreign):
        return f"{named}: each request to the server says how it is sampled, as in its field `{of_requests[0][2:].replace('-', '_')}`; leave it out here."
    text = f"{named}: options of vLLM are keys of the recipe here"
    if settings:
        text += f"; on the command line, type `{' '.join(settings)}`"
    if gone:
        text += f"; leave out {', '.join(gone)}, which vLLM no longer has"
    if of_requests:
        text += f"; leave out {', '.join(of_requests)}, which each request to the server says"
    return f"{text}."


def _with_method(section: dict[str, Any]) -> dict[str, Any]:
    """The same with vLLM's spelling of n-gram as a model."""
    section = {name.replace("-", "_"): value for name, value in section.items()}
    return todays_method({WHOLE: section}) if section.get("model") in ("ngram", "[ngram]") else section


def _foreign_options(words: Sequence[str], own: set[str]) -> Iterator[tuple[str, str]]:
    """Options in a command line that are not the command's, by name, with their values; `true` for one without."""
    near = sorted(option for option in own if option.startswith("--"))
    for place, word in enumerate(words):
        name, given, value = word.partition("=")
        if name in own or not (name.startswith("--") or name in _SHORT) or name == "--":
            continue
        if "." not in name and difflib.get_close_matches(name, near, n=1, cutoff=0.8):
            continue  # more likely a slip; the parser names the option that is meant
        if not given:
            value = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("-") else "true"
        yield _SHORT.get(name, name.lstrip("-")), value


def _value(text: str) -> Any:
    """As vLLM reads the keys of `--speculative-config.KEY`: JSON, or the text itself, such as a model's name."""
    try:
        return json.loads(text)
    except ValueError:
        return text
