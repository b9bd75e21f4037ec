"""What a driver runs: the names that its entry point gets, and whether it hides how it ended.

KubeRay takes the exit status of the entry point for that of the training. Ray runs it with `sh`,
which is `dash` on Debian: there is no `pipefail`, so `train | tee log` succeeds whatever `train`
does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from rollway.errors import SpecError

_REFERENCE = re.compile(r"\$\{((?:dynamo|deployments)\.[^}]*)\}")
_ALWAYS_TRUE = ("true", ":", "exit 0", "echo")
_OPERATORS = ("||", "&&", "|&", "|", ";", "&", "\n")
_ENDS = (";", "\n")
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
    commands = split_commands(text)
    if not commands:
        return None
    for position, (command, operator) in enumerate(commands):
        words = split_words(command)
        after_pipe = position > 0 and commands[position - 1][1] in ("|", "|&")
        if after_pipe and words[:1] == ["tee"]:
            return f"It ends a pipe with `tee`, whose exit status is taken for the driver's. {_FIX}"
        if (script := _find_script(words)) is not None and (why := explain_hidden_status(script)):
            return why
        if operator == "&" and position == len(commands) - 1:
            return "It runs its last command in the background. Remove the `&`."
    last, before = commands[-1][0], commands[-2][1] if len(commands) > 1 else ""
    if before in ("|", "|&"):
        return f"It ends with a pipe, whose last command decides the exit status. {_FIX}"
    if before in ("||", ";", "\n") and last.startswith(_ALWAYS_TRUE):
        return f"Its last command is `{last[:40]}`, which succeeds always. Remove it."
    return None


def _find_script(words: list[str]) -> str | None:
    """Return the script that a command hands to a shell without `pipefail`."""
    if not words or words[0].rpartition("/")[2] not in ("sh", "bash", "dash", "exec"):
        return None
    if words[0] == "exec":
        return _find_script(words[1:])
    for index, word in enumerate(words[1:], 1):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            script = words[index + 1] if index + 1 < len(words) else ""
            return None if "pipefail" in words or "pipefail" in script else script
    return None


def split_words(command: str) -> list[str]:
    """Return the words of a simple command, without the variables that it sets."""
    try:
        words = shlex.split(command)
    except ValueError:
        return []  # `sh` says what is wrong with it
    while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
        words = words[1:]
    return words


def split_commands(text: str) -> list[tuple[str, str]]:
    """Split a script into simple commands, each with the operator that follows it.

    Quotes, comments and command substitutions are skipped over: a pipe in `$(…)` hides nothing of
    the command around it."""
    commands: list[tuple[str, str]] = []
    command, position = "", 0
    while position < len(text):
        end = _skip(text, position)
        operator = "" if end > position else _read_operator(text, position)
        if operator:
            commands.append((command.strip(), operator))
            command, position = "", position + len(operator)
            continue
        end = max(end, position + 1)
        command += "" if _begins_comment(text, position) else text[position:end]
        position = end
    commands.append((command.strip(), ""))
    # A line end after an operator continues the line, and one at the end ends nothing.
    kept = [(command, operator) for command, operator in commands if command]
    if kept and kept[-1][1] in _ENDS:
        kept[-1] = (kept[-1][0], "")
    return kept


def _read_operator(text: str, position: int) -> str:
    """Return the operator that begins here; "" for a sign that belongs to a redirection."""
    operator = next((sign for sign in _OPERATORS if text.startswith(sign, position)), "")
    before, after = text[position - 1 : position], text[position + 1 : position + 2]
    is_redirection = (operator in ("&", "|") and before in ("<", ">")) or (
        operator == "&" and after == ">"  # 2>&1, >|file, &>file
    )
    return "" if is_redirection else operator


def _begins_comment(text: str, position: int) -> bool:
    before = text[position - 1 : position]
    return text[position] == "#" and (not before or before.isspace() or before == ";")


def _skip(text: str, position: int) -> int:
    """Return the position after the quoted, escaped or substituted part, or the comment, that
    begins here; the same position if none does."""
    character = text[position]
    if character == "\\":
        return position + 2
    if character == "'":
        return _find(text, "'", position + 1) + 1
    if _begins_comment(text, position):
        return _find(text, "\n", position)
    if character in ('"', "`"):
        return _skip_until(text, position + 1, character, "\\$")
    if text.startswith("$(", position):
        return _skip_until(text, position + 2, ")")
    return position


def _skip_until(text: str, position: int, end: str, special: str = "") -> int:
    """Return the position after `end`; in double quotes only `special` signs have a meaning."""
    while position < len(text) and text[position] != end:
        nested = not special or text[position] in special
        position = max(_skip(text, position) if nested else 0, position + 1)
    return position + 1


def _find(text: str, sign: str, start: int) -> int:
    end = text.find(sign, start)
    return len(text) if end < 0 else end
