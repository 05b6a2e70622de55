"""`draftsmith export` and `draftsmith import`: stores to and from the layouts of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.cli.common import AsJson, describe, print_json
from draftsmith.run.errors import UserError

_Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist.", show_default=False)]


def export(
    store: Annotated[str, typer.Argument(help="A store: a folder, or OWNER/NAME\\[@REVISION] on the Hub.")],
    to: Annotated[str, typer.Option(metavar="LAYOUT", help="`files` or `speculators`.", show_default=False)],
    out: _Out,
    as_json: AsJson = False,
) -> None:
    """A store's tokens and hidden states for other programs, every byte checked; `draftsmith import` reads them back.

    `files`: one safetensors file a sequence, as vLLM's hidden-states connector writes them. `speculators`: a data set for
    speculators' trainer.
    """
    _require("--to", to, ("files", "speculators"))
    from draftsmith.store.exchange import export_store
    from draftsmith.store.reader import Store
    from draftsmith.target.hub import local_directory

    figures = export_store(Store(local_directory(store)), to, out)  # type: ignore[arg-type]
    if "train_data_ratio" in figures and not as_json:
        print(f"To hold out the same sequences, train with --train-data-ratio {figures['train_data_ratio']}")
    if as_json:
        print_json(figures)


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Safetensors files, one a sequence, or a data set of speculators.", show_default=False
        ),
    ],
    target: Annotated[str, typer.Option(help="The target of the states: a folder or a Hub id.", show_default=False)],
    layer_ids: Annotated[
        str,
        typer.Option(
            metavar="2,15,27,30",
            help="Layer ids of the states, in order: i is the input of decoder layer i; the number of layers is the output of the "
            "last one.",
            show_default=False,
        ),
    ],
    out: _Out,
    loss_mask: Annotated[
        str | None,
        typer.Option(
            help="Tokens to train on: `template` (the answers, found by the target's chat template) or `ones` (all). Default: "
            "what the files or rows say, and `template` where they say nothing.",
            show_default=False,
        ),
    ] = None,
    held_out_fraction: Annotated[
        float,
        typer.Option(
            min=0, max=0.99, help="Share to hold out, chosen by a hash of the prompt, of sequences that do not say it."
        ),
    ] = 0.05,
    compression: Annotated[str, typer.Option(help="`lossless`, `none` or `int8`.")] = "lossless",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the target.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import hidden states from other programs into a finished store, for `draftsmith train`.

    Every sequence is checked: lengths, shapes, finite, not zero, and the checksum if Draftsmith wrote the file. One that cannot be
    used is reported, and no store is written.

    draftsmith import states/ --target meta-llama/Llama-3.1-8B-Instruct --layer-ids 2,16,29,32 --out runs/NAME/store
    """
    _require("--loss-mask", loss_mask, ("template", "ones"))
    _require("--compression", compression, ("lossless", "none", "int8"))
    from draftsmith.run.atomic_io import require_new
    from draftsmith.store.exchange import import_states

    require_new(out)
    try:
        ids = tuple(int(word) for word in layer_ids.split(","))
    except ValueError:
        raise UserError(f"`--layer-ids {layer_ids}` must be integers with commas, as in 2,15,27,30.") from None
    figures: dict[str, Any] = import_states(
        source,
        out,
        target=describe(target, "none", trust_remote_code),
        layer_ids=ids,
        loss_mask=loss_mask,  # type: ignore[arg-type]
        held_out_fraction=held_out_fraction,
        compression=compression,  # type: ignore[arg-type]
    )
    if as_json:
        print_json(figures)


def _require(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise UserError(f"`{option} {value}` must be one of {', '.join(choices)}.")
