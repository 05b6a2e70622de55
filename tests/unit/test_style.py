"""The formatter's decisions stand: `# fmt: skip` is for tables, which a reader scans by rows."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LITERALS = (ast.Dict, ast.List, ast.Set, ast.Tuple)
COMMENT = "# fmt: " + "skip"


def skips_elsewhere(source: str) -> list[int]:
    """Lines with the comment that end neither a statement whose value is a literal nor a decorator, such as parametrized cases."""
    lines = [number for number, line in enumerate(source.splitlines(), 1) if line.rstrip().endswith(COMMENT)]
    if not lines:
        return []
    nodes = list(ast.walk(ast.parse(source)))
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    decorators = [
        each for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) for each in node.decorator_list
    ]
    found = []
    for line in lines:
        if any(each.lineno <= line <= (each.end_lineno or 0) for each in decorators):
            continue
        around = [node for node in statements if node.lineno <= line <= (node.end_lineno or 0)]
        if not is_table(min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)):
            found.append(line)
    return found


def is_table(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    if isinstance(value, ast.BinOp):
        return isinstance(value.left, LITERALS) or isinstance(value.right, LITERALS)
    if isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    return isinstance(value, LITERALS)


def test_only_tables_are_kept_from_the_formatter() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git's")
    wrong = {
        name: lines for name in listed.stdout.splitlines() if (lines := skips_elsewhere((ROOT / name).read_text()))
    }
    assert not wrong


def test_a_call_is_no_table() -> None:
    assert skips_elsewhere(f"call(\n    1,\n    name=2,\n)  {COMMENT}\n") == [4]
    assert skips_elsewhere(f"TABLE = {{\n    1: 2, 3: 4,\n}}  {COMMENT}\n") == []
