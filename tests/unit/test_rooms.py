"""A package imports only packages below it, so the graph of packages has no cycle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import rollway

BASE = "errors extras private plain spec_errors config http orders processes versions"
REST = "bench chaos cli demo gateway integrations observe __init__"
API = "api sync aio async_stack publishing"
ORDER = [BASE, "weights", "engine rollout", "fleet", "stack", API, REST]
"""From the bottom to the top, as in docs/architecture.md."""
IMPORT_EACH_OTHER = (BASE, API, REST)
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(package, imported package): the reason why it must be so."""


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


def test_a_package_imports_only_packages_below_it() -> None:
    level = {name: step for step, names in enumerate(ORDER) for name in names.split()}
    source, wrong = Path(rollway.__file__).parent, set()
    for file in source.rglob("*.py"):
        package = file.relative_to(source).with_suffix("").parts[0]
        for name in list_imports(ast.parse(file.read_text())):
            imported = f"{name}.".split(".")[1] if name.split(".")[0] == "rollway" else package
            # A name of `rollway` itself counts as the top.
            step = level.get(imported, len(ORDER) - 1)
            is_peer = step == level[package] and ORDER[step] in IMPORT_EACH_OTHER
            is_allowed = imported == package or is_peer or (package, imported) in EXCEPTIONS
            if step >= level[package] and not is_allowed:
                wrong.add(f"{file.relative_to(source)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))
