"""A package imports only packages below it, so the graph of packages has no cycle; packages keep
their budgets, and names mean one thing; no test module imports another."""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
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

MOST_LINES, MOST_MODULES = 43_750, 260
"""Of the whole package: lines with code on them. Comments and docstrings are free."""

BUDGET = {
    "base": (16, 2_490),
    "cli": (15, 1_630),
    "demo": (6, 690),
    "engine": (19, 3_370),
    "fleet": (13, 2_870),
    "gateway": (12, 2_350),
    "integrations/curator": (5, 640),
    "integrations/nemo_rl": (16, 2_580),
    "integrations/prime_rl": (15, 2_380),
    "integrations/verl": (14, 1_470),
    "kubernetes": (23, 4_190),
    "observe": (29, 5_150),
    "rollout": (11, 1_800),
    "stack": (16, 3_450),
    "stack/ray": (10, 1_940),
    "weights": (40, 6_910),
}
"""The most modules and lines of each package: what it has, as long as that is more than the plan of
the code gives it. A package may shrink, and not grow; a new one needs an entry."""

MOST_SHARED_CLASSES, MOST_SHARED_FILES = 16, 22
"""How many names are those of several classes, or of several files: what the package has. A new
class or file has a name of its own."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}

SOURCE, TESTS = Path(rollway.__file__).parent, Path(__file__).parents[1]
LISTS_TESTS = TESTS / "unit" / "prime_rl" / "test_findings.py"
"""Names a test for every finding, and must fail when one of them is renamed."""


@cache
def parse_package() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in SOURCE.rglob("*.py")}


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
    wrong = set()
    for file, tree in parse_package().items():
        package = find_room(file.relative_to(SOURCE).with_suffix("").parts, level)
        for name in list_imports(tree):
            if name.split(".")[0] != "rollway":
                continue
            imported = find_room(f"{name}.".split(".")[1:], level)
            # A name of `rollway` itself is one of its `__init__`.
            step = level.get(imported, level["__init__"])
            if imported != package and step >= level[package]:
                wrong.add(f"{file.relative_to(SOURCE)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_package_and_its_rooms_keep_their_budgets() -> None:
    modules, lines = Counter[str](), Counter[str]()
    for file, tree in parse_package().items():
        package, *inner = file.relative_to(SOURCE).parts
        room = f"{package}/{inner[0]}" if package in ("stack", "integrations") else package
        room = room.removesuffix(f"/{file.name}") if inner else "base"
        modules[room] += len(file.read_text().splitlines()) > 5 or file.name != "__init__.py"
        lines[room] += count_code(file, tree)
    assert modules.total() <= MOST_MODULES and lines.total() <= MOST_LINES
    # An empty `__init__.py` is no room.
    sizes = {room: (modules[room], count) for room, count in lines.items() if count}
    over = {
        room: f"{size} is over {BUDGET.get(room)}"
        for room, size in sizes.items()
        if any(map(int.__gt__, size, BUDGET.get(room, (0, 0))))
    }
    assert not over


def count_code(file: Path, tree: ast.Module) -> int:
    """Count the lines of a file with code on them: no blanks, comments or docstrings."""
    lines: set[int] = set()
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant):
                lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


def test_a_name_means_one_thing() -> None:
    trees = parse_package()
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    classes = list_shared(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert len(classes) <= MOST_SHARED_CLASSES, " ".join(classes)
    files = list_shared(file.name for file in trees if file.name != "__init__.py")
    assert len(files) <= MOST_SHARED_FILES, " ".join(files)


def list_shared(names: Iterable[str]) -> list[str]:
    """Return the names that come more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_what_tests_share_is_in_no_test_module() -> None:
    """Helpers are in conftest.py or beside the tests: pytest collects an imported test twice."""
    wrong = set()
    for file in set(TESTS.rglob("*.py")) - {LISTS_TESTS}:
        for name in list_imports(ast.parse(file.read_text())):
            package, *parts = name.split(".")
            if package == "tests" and any(part.startswith("test_") for part in parts):
                wrong.add(f"{file.relative_to(TESTS)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))
