"""`draftsmith convert`: the convert stage of a recipe, or any checkpoint to any format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.cli.common import AsJson, Overrides, RunsDir, describe, print_json
from draftsmith.cli.stages import convert_stage, run_stage
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console

if TYPE_CHECKING:
    from draftsmith.drafters.base import Drafter
    from draftsmith.target.info import TargetInfo
    from draftsmith.target.prepare import Weights

_RUNS = Path("runs")


def convert(
    source: Annotated[
        Path | None,
        typer.Argument(help="A recipe or, with --to, a drafter: a folder or a Hub id.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    runs: RunsDir = _RUNS,
    as_json: AsJson = False,
    to: Annotated[str | None, typer.Option(help="Format to write; see --list.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; must not exist.", show_default=False)] = None,
    named: Annotated[
        str | None,
        typer.Option("--from", help="Format to read. Default: detected from the content.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The drafter's target, a folder or a Hub id, for formats that leave out some of its config.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --target: run Python code that comes with the target.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the source's.", show_default=False)
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option("--vocab", help="Resize the drafter's draft vocabulary to N tokens.", show_default=False),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="With --vocab: the store whose N most frequent tokens to use.", show_default=False),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="With --to vllm: 8-bit weights, as int8 or fp8 (GPUs) or int8-dynamic (also CPUs).", show_default=False
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare the logits of source and result; with --to vllm and --target, also vLLM's draft tokens.",
        ),
    ] = False,
    list_formats: Annotated[
        bool, typer.Option("--list", help="Print the formats and the possible conversions.")
    ] = False,
) -> None:
    """Checkpoint to RUNS/NAME/vllm, which stock vLLM loads; or, with --to, any drafter to any format.

    draftsmith convert recipes/demo.yaml

    draftsmith convert path/to/drafter --to vllm --out drafter-vllm --target path/to/target
    """
    if list_formats:
        _print_formats()
    elif source is None:
        raise UserError("Name a recipe, or a drafter's folder and --to FORMAT; --list prints the formats.")
    elif to is not None:
        if overrides or runs != _RUNS:
            raise UserError(
                "-s and --runs belong to a recipe, and with --to a drafter is converted: use --dtype and --quantize. A run's own drafter is in "
                "runs/NAME/checkpoint."
            )
        figures = _convert_drafter(
            source,
            to,
            out,
            named=named,
            target=target,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            vocabulary=vocabulary,
            store=store,
            quantize=quantize,
            verify=verify,
        )
        if as_json:
            print_json(figures)
    else:
        with_to = {
            "--out": out, "--from": named, "--target": target, "--dtype": dtype, "--vocab": vocabulary, "--store": store,
            "--quantize": quantize, "--verify": verify or None, "--trust-remote-code": trust_remote_code or None,
        }  # fmt: skip
        if given := [name for name, value in with_to.items() if value is not None]:
            raise UserError(f"{', '.join(given)} needs --to FORMAT, the format to write; --list prints the formats.")
        run_stage(convert_stage, source, overrides, runs, as_json)


def _convert_drafter(
    source: Path,
    to: str,
    out: Path | None,
    *,
    named: str | None,
    target: str | None,
    trust_remote_code: bool,
    dtype: str | None,
    vocabulary: int | None,
    store: Path | None,
    quantize: str | None,
    verify: bool,
) -> dict[str, Any]:
    """Check the options, find source and target, and convert; returns the figures."""
    from draftsmith.convert.convert import NATIVE, convert_checkpoint, leaves_tensors_out
    from draftsmith.convert.formats import FORMATS
    from draftsmith.convert.quantize import SCHEMES
    from draftsmith.target.hub import local_directory

    formats = [NATIVE, *FORMATS]
    for option, value, choices in (
        ("--to", to, formats),
        ("--from", named, formats),
        ("--dtype", dtype, ["float32", "bfloat16", "float16"]),
        ("--quantize", quantize, [*SCHEMES]),
    ):
        if value is not None and value not in choices:
            raise UserError(f"`{option} {value}` must be one of {', '.join(choices)}.")
    if (vocabulary is None) != (store is None):
        raise UserError("--vocab and --store go together: the N most frequent tokens of the store are used.")
    if vocabulary is not None and vocabulary < 1:
        raise UserError(f"--vocab must be at least 1, not {vocabulary}.")
    if out is None:
        raise UserError("Name the folder to write with --out.")
    source = local_directory(source)
    served = verify and to == "vllm" and find_spec("vllm") is not None
    info = None
    if target is not None:
        reads = verify or vocabulary is not None or leaves_tensors_out(source, to, named)
        weights: Weights = "all" if served else "shared" if reads else "none"
        info = describe(target, weights, trust_remote_code)
    return convert_checkpoint(
        source,
        out,
        to=to,
        named=named,
        target=info,
        dtype=dtype,
        vocabulary=vocabulary,
        store=store,
        quantize=quantize,
        verify=verify,
        served=_compare_with_vllm(info) if verify and to == "vllm" else None,
    )


def _compare_with_vllm(target: TargetInfo | None) -> Callable[[Path, Drafter], dict[str, Any]] | None:
    """The function that compares vLLM's draft tokens with the drafter's own; None, with a message, if it cannot run."""
    missing = "without --target" if target is None else "without vLLM installed" if find_spec("vllm") is None else None
    if target is None or missing:
        console.print(f"verify: {missing} only logits are compared, not vLLM's draft tokens")
        return None
    from draftsmith.serve.proposals import verify_served

    return partial(verify_served, target_dir=target.path, trust_remote_code=target.trust_remote_code)


def _print_formats() -> None:
    from draftsmith.convert.convert import table_of_formats

    for name, title, kinds, others in table_of_formats():
        print(f"{name:<12} {title}: {', '.join(kinds)}")
        print(f"{'':<12}   from and to {', '.join(others)}")
