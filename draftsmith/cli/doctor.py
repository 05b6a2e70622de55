"""`draftsmith doctor`: what this machine can do, and what is wrong with the installation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.cli.common import AsJson, RunsDir, print_json

if TYPE_CHECKING:
    from draftsmith.cli.checks import Finding

_COLORS = {"good": "green", "note": "yellow", "wrong": "bold red"}


def doctor(runs: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """Say what this machine can do and what is wrong with the installation. Exit status 1 if a run would fail.

    Checks Python, package versions, torch, the driver, GPUs, vLLM with its plugin and kernels, cores, memory, disk and the
    Hub's settings. Contacts nothing and changes nothing.
    """
    from draftsmith.cli.checks import run_checks

    findings = run_checks(runs)
    wrong = any(finding.status == "wrong" for finding in findings)
    if as_json:
        print_json({"works": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    if wrong:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    table = Table(show_header=False, show_lines=True)
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n{finding.advice}", style=_COLORS[finding.status])
        table.add_row(finding.name, Text(finding.status, style=_COLORS[finding.status]), text)
    Console().print(table)
