"""What the sandbox's interpreter runs, by `-c`: the model's `main.py`, as a notebook would.

The value of a last expression is printed unless it is None, so a program without a print answers
too. Tracebacks begin at the model's own lines.
"""

from __future__ import annotations

import ast
import sys
import traceback
import types
from pathlib import Path
from typing import Any


def run(source: str, names: dict[str, Any]) -> None:
    tree = ast.parse(source, "main.py")
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "main.py", "exec", dont_inherit=True), names)
        return
    del tree.body[-1]
    exec(compile(tree, "main.py", "exec", dont_inherit=True), names)
    value = eval(compile(ast.Expression(last.value), "main.py", "eval", dont_inherit=True), names)
    if value is not None:
        print(value)


def main() -> None:
    # A module of its own under the usual name: dataclasses and others look theirs up there.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        run(Path("main.py").read_text(encoding="utf-8"), vars(module))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (whatever the program raised)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "main.py":
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)


if __name__ == "__main__":
    main()
