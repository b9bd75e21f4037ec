"""Write docs/api.md from the docstrings of the public names: `python scripts/api_page.py`.

Docstrings have Google's sections (Args, Returns, Raises, Attributes, Example). `find_gaps` lists
public names whose docstring lacks one of them; a test requires that there is none, and that the
page is up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rollway

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")
GROUPS = {
    "Start or attach": ("up", "attach", "make_spec", "load_spec", "StackSpec"),
    "A running stack": ("Stack", "Fleet", "RefitReport", "SleepReport"),
    "Sample and score": ("Rollouts", "Sampling", "Rollout", "Teacher", "Scores"),
    "Conversations": ("Conversation", "TokenSequence"),
    "Publish weights": ("Publisher", "Offer", "from_module", "from_megatron", "join_offers"),
}
# Methods of public classes that only Rollway calls.
INTERNAL = {
    "Offer.sign",
    "Offer.signed",
    "Sampling.offset_seed",
    "Sampling.on_wire",
    "Sampling.penalised",
    "Sampling.shifted",
    "StackSpec.needs_etcd",
    "StackSpec.needs_nats",
    "Stack.invitation",
}
INTRO = """# API

<!-- Written by scripts/api_page.py from the docstrings: edit those, then run it again. -->

Everything below is in `rollway`. The names block; `rollway.aio` has the same names as coroutines
(see [Async](#async)). Examples that run are in [examples/](../examples).

```python
with rollway.up(model=path, workers=2) as stack, stack.publisher() as weights:
    for step in range(1, steps):
        group = stack.rollouts().generate(prompt_ids, rollway.Sampling(max_tokens=64), n=8)
        train(model, group)
        stack.refit(step, weights.publish(step, model.named_parameters()))
```
"""


@dataclass
class Docstring:
    """A docstring, divided into its text and its sections."""

    text: str
    sections: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: str | None) -> Docstring:
        parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.cleandoc(raw or ""), flags=re.M)
        bodies = (textwrap.dedent(body).strip() for body in parts[2::2])
        return cls(parts[0].strip(), dict(zip(parts[1::2], bodies, strict=True)))

    def list_entries(self, section: str) -> dict[str, str]:
        """Return the entries of Args, Attributes or Raises: what is described, and how."""
        entries: dict[str, str] = {}
        for line in re.split(r"\n(?=\S)", self.sections.get(section, "")):
            name, _, text = line.partition(":")
            if text:
                entries[name.strip()] = " ".join(text.split())
        return entries


def list_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, in the order of the source."""
    for name, member in vars(cls).items():
        if name.startswith("_") or f"{cls.__name__}.{name}" in INTERNAL:
            continue
        if isinstance(member, property | classmethod) or inspect.isfunction(member):
            yield name, member


def list_fields(cls: type) -> dict[str, tuple[str, str]]:
    """Return the annotated fields of a class: type with default, and the string below each."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    fields: dict[str, tuple[str, str]] = {}
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        kind = ast.unparse(statement.annotation).strip("'\"")
        kind = re.sub(r"^Annotated\[(\w+),.*", r"\1", kind)
        kind += _format_default(statement.value)
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        text = str(following.value.value) if is_text else ""  # type: ignore[union-attr]
        if not name.startswith("_"):
            fields[name] = (kind, " ".join(text.split()))
    return fields


def _format_default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):  # Field(default=…, …)
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    if isinstance(value, ast.Constant | ast.UnaryOp | ast.Tuple):
        return f" = {ast.unparse(value)}"
    return ""


def get_function(member: Any) -> Callable[..., Any] | None:
    if isinstance(member, property):
        return None
    function: Callable[..., Any] = getattr(member, "__func__", member)  # of a class method
    return function


def list_options(function: Callable[..., Any]) -> list[str]:
    """Return the names of keyword options that `**options: Unpack[…]` stands for."""
    wrapped = inspect.unwrap(function)
    annotation = str(wrapped.__annotations__.get("options", ""))
    match = re.fullmatch(r"Unpack\[(\w+)\]", annotation)
    if match is None:
        return []
    return list(typing.get_type_hints(wrapped.__globals__[match[1]]))


def list_parameters(function: Callable[..., Any]) -> list[str]:
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            names += list_options(function) or [name]
        else:
            names.append(name)
    return names


def format_signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        is_first_keyword = parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts
        if is_first_keyword and not any(part.startswith("*") for part in parts):
            parts.append("*")
        if parameter.kind is parameter.VAR_KEYWORD and (options := list_options(function)):
            parts += [*([] if "*" in parts else ["*"]), *(f"{option}=…" for option in options)]
            continue
        text = str(parameter.replace(annotation=parameter.empty))
        if parameter.annotation is not parameter.empty:
            text = text.partition("=")[0] + f": {parameter.annotation}"
            if parameter.default is not parameter.empty:
                text += f" = {parameter.default!r}"
        parts.append(text)
    # The page describes blocking names; a blocking iterator has the signature of the async one.
    end = f" -> {signature.return_annotation}".replace("AsyncIterator", "Iterator")
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= 96:
        return line
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > 90:
            lines.append("")
        lines[-1] += f"{part}, "
    return "\n".join([f"{name}(", *(f"    {line.rstrip()}" for line in lines), f"){end}"])


# --- gaps ----------------------------------------------------------------------------------


def list_public() -> dict[str, Any]:
    """Return what the page describes in full: all public names but the errors and modules."""
    return {
        name: getattr(rollway, name)
        for name in rollway.__all__
        if not inspect.ismodule(getattr(rollway, name)) and not is_error(getattr(rollway, name))
    }


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def find_gaps() -> list[str]:
    """Return what docstrings of public names lack, one line each."""
    gaps: list[str] = []
    for name, value in list_public().items():
        if "Example" not in Docstring.parse(value.__doc__).sections:
            gaps.append(f"{name}: no Example")
        if not inspect.isclass(value):
            gaps += _find_function_gaps(name, value)
            continue
        for member_name, member in list_members(value):
            function = get_function(member)
            label = f"{name}.{member_name}"
            if function is None:
                gaps += [] if member.__doc__ else [f"{label}: no docstring"]
            else:
                gaps += _find_function_gaps(label, function)
    return gaps


def _find_function_gaps(label: str, function: Callable[..., Any]) -> list[str]:
    doc = Docstring.parse(function.__doc__)
    if not doc.text:
        return [f"{label}: no docstring"]
    gaps = []
    described = ", ".join(doc.list_entries("Args")).replace("*", "")
    # "arguments and errors as for `rollouts`" refers to a docstring that lists them.
    refers = re.search(r"(?i)\barguments\b", doc.text)
    for parameter in [] if refers else list_parameters(function):
        if parameter not in described.split(", "):
            gaps.append(f"{label}: no Args entry for {parameter}")
    returns = str(inspect.signature(function).return_annotation)
    says = "Returns" in doc.sections or refers or re.search(r"(?i)\b(return|yield)\b", doc.text)
    if returns not in ("None", "Self") and not says:
        gaps.append(f"{label}: no Returns")
    return gaps


# --- the page ------------------------------------------------------------------------------


def render_doc(doc: Docstring) -> Iterator[str]:
    """Yield the parts of a docstring as Markdown."""
    yield doc.text
    for section in ("Args", "Attributes", "Raises"):
        entries = doc.list_entries(section)
        if entries:
            title = {"Args": "Arguments"}.get(section, section)
            lines = [f"- `{name.replace(', ', '`, `')}`: {text}" for name, text in entries.items()]
            yield "\n".join([f"{title}:", "", *lines])
        if section == "Args" and "Returns" in doc.sections:
            yield f"Returns: {' '.join(doc.sections['Returns'].split())}"
    if "Example" in doc.sections:
        yield f"```python\n{doc.sections['Example']}\n```"


def render_class(name: str, cls: type) -> Iterator[str]:
    yield f"### {name}"
    yield from render_doc(Docstring.parse(cls.__doc__))
    fields = list_fields(cls)
    if fields and not issubclass(cls, rollway.Publisher):
        lines = [
            f"- `{field_name}: {kind}`" + (f" {text}" if text else "")
            for field_name, (kind, text) in fields.items()
        ]
        yield "\n".join(["Fields:", "", *lines])
    for member_name, member in list_members(cls):
        function = get_function(member)
        doc = Docstring.parse(member.__doc__ if function is None else function.__doc__)
        label = f"{name}.{member_name}"
        yield f"#### {label}"
        if function is not None:
            yield f"```python\n{format_signature(member_name, function)}\n```"
        yield from render_doc(doc)


def render_errors() -> Iterator[str]:
    yield "## Errors"
    yield from render_doc(Docstring.parse(rollway.RollwayError.__doc__))
    rows = ["| error | is a | when |", "|---|---|---|"]
    for name in rollway.__all__:
        error = getattr(rollway, name)
        if is_error(error) and error is not rollway.RollwayError:
            text = " ".join(Docstring.parse(error.__doc__).text.split())
            rows.append(f"| `{name}` | `{error.__base__.__name__}` | {text} |")
    yield "\n".join(rows)


def render_page() -> str:
    """Return the whole page."""
    public = list_public()
    index = [
        f"- {title}: " + ", ".join(f"[{name}](#{name.lower()})" for name in names)
        for title, names in GROUPS.items()
    ]
    parts = [INTRO.strip(), "\n".join([*index, "- [Errors](#errors), [Async](#async)"])]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        for name in names:
            value = public.pop(name)
            if inspect.isclass(value):
                parts += render_class(name, value)
            else:
                parts += [f"### {name}", f"```python\n{format_signature(name, value)}\n```"]
                parts += render_doc(Docstring.parse(value.__doc__))
    assert not public, f"scripts/api_page.py has no group for {', '.join(public)}"
    parts += render_errors()
    parts += ["## Async", *render_doc(Docstring.parse(rollway.aio.__doc__))]
    parts.append(f"`rollway.aio` has `{'`, `'.join(rollway.aio.__all__)}`.")
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page())
    for gap in find_gaps():
        print(gap)
