"""The code that the sandbox's interpreter runs by `-c`: it runs the model's `main.py`.

Like a notebook, it prints the value of a last expression unless that is None, so a program without
a print has output too. Tracebacks begin at the model's own lines.
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
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "main.py", "exec", dont_inherit=True), names)
    if isinstance(last, ast.Expr):
        expression = ast.Expression(last.value)
        value = eval(compile(expression, "main.py", "eval", dont_inherit=True), names)
        if value is not None:
            print(value)


def main() -> None:
    # A new module under the usual name: dataclasses and others look up their module there.
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
