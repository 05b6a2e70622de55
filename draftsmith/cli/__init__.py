"""The command line, one file per group of commands.

Commands import what they run when they run, so `--help` and recipe errors are instant.
"""

import errno
import sys

import typer
from rich.markup import escape

from draftsmith import __version__
from draftsmith.cli import convert, doctor, evaluate, exchange, generate, inspect, predict, publish, stages
from draftsmith.cli.vllm_options import VllmCommand
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.progress import console

app = typer.Typer(
    help="Speculative decoding for vLLM: extract a target's hidden states, train a drafter, convert, evaluate and serve it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def version() -> None:
    """Print the version."""
    print(__version__)


_LIKE_VLLM = (stages.serve, generate.generate)
for command in (
    stages.run,
    stages.extract,
    stages.train,
    convert.convert,
    predict.predict,
    evaluate.evaluate,
    stages.tune,
    stages.serve,
    generate.generate,
    publish.publish,
    inspect.inspect,
    exchange.export,
    exchange.import_,
    doctor.doctor,
    version,
):
    kind = VllmCommand if command in _LIKE_VLLM else None
    app.command(command.__name__.strip("_"), cls=kind)(command)


_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _about_file(error: OSError) -> str:
    """One paragraph about a file that could not be read or written."""
    where = f"{error.filename}: " if error.filename is not None else ""
    text = f"{where}{error.strerror or error}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{text} Free some space and run the same command again: what is finished is kept."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{text} Change who may read or write there, or name another folder (`--runs` for the runs)."
    return text


def main() -> None:
    """Entry point. Errors are one paragraph and an exit status, never a traceback for bad input."""
    try:
        app()
    except DraftsmithError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)
    except OSError as error:
        if error.filename is None and error.errno not in _OF_DISKS:  # of a connection, as a rule: a defect
            raise
        console.print(f"[bold red]error:[/] {escape(_about_file(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == 130:  # typer's exit status after Ctrl-C
            console.print("interrupted; run the same command again to continue")
        raise
