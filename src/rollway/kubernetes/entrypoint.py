"""What a driver runs: the names that its entry point gets, and whether it hides how it ended.

KubeRay takes the exit status of the entry point for that of the training. Ray runs it with `sh`,
which is `dash` on Debian: there is no `pipefail`, so `train | tee log` succeeds whatever `train`
does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import dropwhile

from rollway.errors import SpecError

_REFERENCE = re.compile(r"\$\{((?:dynamo|deployments)\.[^}]*)\}")
_COMMENT = re.compile(r"(^|[\s;])#[^\n]*")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_TAKES_SCRIPT = re.compile("-[A-Za-z]*c")
_ALWAYS_TRUE = ("true", ":", "exit 0", "echo")
_FIX = "Write to a file with `>`, or run it as `bash -o pipefail -c '…'`."


def resolve_entrypoint(text: str, names: Mapping[str, str], field: str) -> str:
    """Return an entry point with the names of objects in the place of `${dynamo.KEY}`."""
    check_line_ends(text, field)

    def replace(match: re.Match[str]) -> str:
        if match[1] not in names:
            known = ", ".join(f"${{{name}}}" for name in names) or "none"
            raise SpecError(
                f"`{field}` has {match[0]}, and the infra file has no `{match[1]}`.",
                f"There are: {known}.",
            )
        return names[match[1]]

    return _REFERENCE.sub(replace, text)


def check_line_ends(text: str, field: str) -> None:
    """Raise SpecError for a carriage return, which `sh` takes for a part of the word before it."""
    if "\r" in text:
        line = text[: text.index("\r")].count("\n") + 1
        raise SpecError(
            f"`{field}` has a Windows line end in line {line}, which `sh` reads as a part of the "
            "command.",
            "Save the file with Unix line ends.",
        )


def explain_hidden_status(text: str) -> str | None:
    """Return how an entry point hides the exit status of its driver; None if it does not.

    Any pipeline that ends in `tee` is named, and whatever the last command does to the status."""
    commands = _split_commands(text)
    before = ""
    for position, (words, operator) in enumerate(commands):
        is_last = position == len(commands) - 1
        if before in ("|", "|&") and (words[:1] == ["tee"] or is_last):
            return f"It ends a pipe, whose last command decides the exit status. {_FIX}"
        if (script := _find_script(words)) is not None and (why := explain_hidden_status(script)):
            return why
        if is_last and operator == "&":
            return "It runs its last command in the background. Remove the `&`."
        last = " ".join(words)
        if is_last and before in ("||", ";", "\n") and last.startswith(_ALWAYS_TRUE):
            return f"Its last command is `{last[:40]}`, which succeeds always. Remove it."
        before = operator
    return None


def _split_commands(text: str) -> list[tuple[list[str], str]]:
    """Split a script into simple commands, each with the operator that follows it; nothing for a
    script that `sh` would not read. A pipe in `$(…)` hides nothing of the command around it."""
    text = _COMMENT.sub(r"\1", text).replace("\\\n", " ").strip()
    for _ in range(text.count("$(") + 1):
        text = _SUBSTITUTION.sub("x", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    commands: list[tuple[list[str], str]] = [([], "")]
    try:
        for token in lexer:
            if set(token) <= set(";&|\n"):
                # A line end after an operator continues the line.
                commands[-1] = (commands[-1][0], token.strip("\n") or "\n")
                commands.append(([], ""))
            elif commands[-1][0] or not re.fullmatch(r"\w+=.*", token, re.DOTALL):
                commands[-1][0].append(token)
    except ValueError:
        return []
    return [(words, operator) for words, operator in commands if words]


def _find_script(words: list[str]) -> str | None:
    """Return the script that a command hands to a shell without `pipefail`."""
    if words[:1] == ["exec"]:
        return _find_script(words[1:])
    if not words or words[0].rpartition("/")[2] not in ("sh", "bash", "dash"):
        return None
    rest = dropwhile(lambda word: not _TAKES_SCRIPT.fullmatch(word), words)
    script = "".join([*rest][1:2])
    return None if "pipefail" in words or "pipefail" in script else script
