"""A package imports only packages below it, so the graph of packages has no cycle; no test module
imports another."""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import rollway

ORDER = [
    "errors",
    "private_files yaml_input http signed_calls versions",
    "model_spec",
    "spec processes",
    "callers",
    "observe",
    "weights",
    "engine rollout",
    "fleet",
    "stack",
    "publishing",
    "stack_handle",
    "sync",
    "api",
    "aio",
    "__init__",
    "gateway",
    "observe.dash",
    "observe.report",
    "kubernetes integrations demo",
    "observe.exporter observe.doctor",
    "cli",
]
"""From the bottom to the top, as in docs/architecture.md."""

MOST_LINES, MOST_MODULES = 50_000, 320
"""Of the whole package: lines with code on them. Comments and docstrings are free."""

BUDGET = {
    "base": (16, 2_510),
    "cli": (15, 1_640),
    "demo": (6, 690),
    "engine": (24, 4_190),
    "fleet": (22, 3_520),
    "gateway": (12, 2_350),
    "integrations/curator": (5, 640),
    "integrations/nemo_rl": (16, 2_580),
    "integrations/prime_rl": (15, 2_380),
    "integrations/verl": (14, 1_470),
    "kubernetes": (23, 4_190),
    "observe": (29, 5_170),
    "rollout": (11, 1_820),
    "stack": (16, 3_460),
    "stack/ray": (10, 1_950),
    "weights": (57, 11_000),
}
"""The most modules and lines of each package: what it has, as long as that is more than the plan of
the code gives it. A package may shrink, and not grow; a new one needs an entry."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}

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


def test_the_package_and_its_rooms_keep_their_budgets() -> None:
    source = Path(rollway.__file__).parent
    modules, lines = Counter[str](), Counter[str]()
    for file in source.rglob("*.py"):
        package, *inner = file.relative_to(source).parts
        room = f"{package}/{inner[0]}" if package in ("stack", "integrations") else package
        room = room.removesuffix(f"/{file.name}") if inner else "base"
        modules[room] += len(file.read_text().splitlines()) > 5 or file.name != "__init__.py"
        lines[room] += count_code(file)
    assert modules.total() <= MOST_MODULES and lines.total() <= MOST_LINES
    # An empty `__init__.py` is no room.
    sizes = {room: (modules[room], count) for room, count in lines.items() if count}
    over = {
        room: f"{size} is over {BUDGET.get(room)}"
        for room, size in sizes.items()
        if any(map(int.__gt__, size, BUDGET.get(room, (0, 0))))
    }
    assert not over


def count_code(file: Path) -> int:
    """Count the lines of a file with code on them: no blanks, comments or docstrings."""
    lines: set[int] = set()
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(file.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant):
                lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


def test_what_tests_share_is_in_no_test_module() -> None:
    """Helpers are in conftest.py or beside the tests: pytest collects an imported test twice."""
    wrong = set()
    for file in set(TESTS.rglob("*.py")) - {LISTS_TESTS}:
        for name in list_imports(ast.parse(file.read_text())):
            package, *parts = name.split(".")
            if package == "tests" and any(part.startswith("test_") for part in parts):
                wrong.add(f"{file.relative_to(TESTS)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))
