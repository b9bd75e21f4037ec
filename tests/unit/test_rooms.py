"""A package imports only packages below it, so the graph of packages has no cycle; no test module
imports another."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import rollway

ORDER = [
    "errors",
    "private plain http orders versions protobuf",
    "ranks",
    "contradictions",
    "model_spec",
    "config processes",
    "observe",
    "weights",
    "engine rollout",
    "fleet",
    "stack",
    "publishing",
    "async_stack",
    "sync",
    "api",
    "aio",
    "__init__",
    "gateway",
    "observe.dash",
    "observe.report",
    "kubernetes integrations demo",
    "observe.export observe.doctor",
    "chaos",
    "bench",
    "cli",
]
"""From the bottom to the top, as in docs/architecture.md."""

TESTS = Path(__file__).parents[1]
LISTS_TESTS = TESTS / "unit" / "prime_rl" / "test_findings.py"
"""Names a test for every finding, and must fail when one of them is renamed."""


def list_imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a file imports, also inside functions, but not under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from list_imports(node)


def find_room(parts: Sequence[str], rooms: Collection[str]) -> str:
    """Return the room of a module: a part of a package may be one of its own."""
    inner = ".".join(parts[:2])
    return inner if inner in rooms else parts[0]


def test_a_package_imports_only_packages_below_it() -> None:
    level = {name: step for step, names in enumerate(ORDER) for name in names.split()}
    source, wrong = Path(rollway.__file__).parent, set()
    for file in source.rglob("*.py"):
        package = find_room(file.relative_to(source).with_suffix("").parts, level)
        for name in list_imports(ast.parse(file.read_text())):
            if name.split(".")[0] != "rollway":
                continue
            imported = find_room(f"{name}.".split(".")[1:], level)
            # A name of `rollway` itself is one of its `__init__`.
            step = level.get(imported, level["__init__"])
            if imported != package and step >= level[package]:
                wrong.add(f"{file.relative_to(source)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))


def test_what_tests_share_is_in_no_test_module() -> None:
    """Helpers are in conftest.py or beside the tests: pytest collects an imported test twice."""
    wrong = set()
    for file in set(TESTS.rglob("*.py")) - {LISTS_TESTS}:
        for name in list_imports(ast.parse(file.read_text())):
            package, *parts = name.split(".")
            if package == "tests" and any(part.startswith("test_") for part in parts):
                wrong.add(f"{file.relative_to(TESTS)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))
