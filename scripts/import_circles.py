"""Fail on a circle of imports between single modules: import-linter's contract compares siblings, and so misses one of a package and a module
in it. Imports for type checkers alone do not count."""

import sys
from graphlib import CycleError, TopologicalSorter

import grimp

graph = grimp.build_graph("draftsmith", exclude_type_checking_imports=True, cache_dir=None)
try:
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
except CycleError as error:
    sys.exit(f"A circle of imports: {' -> '.join(reversed(error.args[1]))}")
print("No circle of imports.")
