"""Map rows of DAPO-Math-17k, AIME 2024 and AIME 2025 to rows of verl.

    load_mapped("BytedTsinghua-SIA/DAPO-Math-17k")     # from the Hugging Face hub
    load_mapped("/data/aime_2025")                     # a source recognised by its path
    load_mapped("aime_2025:/data/validation.parquet")  # a source named before the path

Mapped rows have the same columns for every source, so sources can be mixed. `verl_dataset.py` maps
rows while verl loads them; `write_parquet` writes them to a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollway.errors import UsageError

SUFFIX = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
AGENT = "tool_agent"
SOURCES = {
    "math_dapo": "BytedTsinghua-SIA/DAPO-Math-17k",
    "aime_2024": "Maxwell-Jia/AIME_2024",
    "aime_2025": "yentinglin/aime_2025",
}
"""The name on the hub of each `data_source`, the key under which verl reports scores."""
ALIASES = {
    "math_dapo": ("mathdapo", "dapomath", "dapomath17k", "dapomath17kprocessed", "dapo"),
    "aime_2024": ("aime2024", "aime24"),
    "aime_2025": ("aime2025", "aime25"),
}
"""How a path may spell each source, in lower case, without punctuation and file suffix."""
FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def recognise(entry: str) -> tuple[str, str]:
    """Return the source of an entry of `data.train_files`, and where to load it from."""
    name, colon, path = entry.partition(":")
    if colon and (source := _find_source(name)):
        return source, path
    is_bare_name = re.fullmatch(r"[\w-]+", entry) is not None and not Path(entry).exists()
    if is_bare_name and (source := _find_source(entry)):
        return source, SOURCES[source]
    for part in reversed(re.split(r"/|--", entry)):  # the hub's cache has datasets--owner--name
        if source := _find_source(part):
            return source, entry
    raise UsageError(
        f"`{entry}` does not say which dataset it is.",
        f"Name its directory after one of {', '.join(SOURCES)}, or write `aime_2025:{entry}`.",
    )


def _find_source(part: str) -> str | None:
    """Return the source that one part of a path names, if any."""
    # Cut the end of a name like `aime24-00000-of-00002.parquet`.
    alias = re.sub(r"(-\d+-of-\d+)?(\.\w+)?$", "", part.lower())
    alias = re.sub(r"[^a-z0-9]", "", alias)
    return next((source for source, aliases in ALIASES.items() if alias in aliases), None)


def map_row(
    row: Mapping[str, Any], index: int, source: str, suffix: str = SUFFIX
) -> dict[str, Any]:
    """Return a row in verl's format. A row that is already mapped stays the same."""
    messages, answer = _read_problem(row, source)
    *before, last = messages
    content = last["content"] if last["content"].endswith(suffix) else last["content"] + suffix
    prompt = [{"role": m["role"], "content": m["content"]} for m in before]
    prompt.append({"role": last["role"], "content": content})
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": str(answer).strip()},
        "extra_info": {"index": index},
        "agent_name": AGENT,
    }


def _read_problem(row: Mapping[str, Any], source: str) -> tuple[list[Mapping[str, str]], Any]:
    """Return the messages and the answer. DAPO has verl's columns; the AIME sets have `problem`
    and `answer`, one of them capitalised."""
    columns = {name.lower(): value for name, value in row.items()}
    if "reward_model" in columns and "prompt" in columns:
        messages, answer = list(columns["prompt"]), columns["reward_model"].get("ground_truth")
    else:
        messages = [{"role": "user", "content": columns.get("problem")}]
        answer = columns.get("answer")
    if answer is None or not messages or not isinstance(messages[-1]["content"], str):
        raise UsageError(
            f"A row of {source} has no problem or no answer; its columns are {', '.join(row)}.",
            "It needs problem and answer, or the prompt and reward_model of verl.",
        )
    return messages, answer


def load_mapped(entry: str) -> Any:
    """Return all rows of one entry, as a `datasets.Dataset`."""
    source, path = recognise(entry)
    rows = load(path)
    return rows.map(
        map_row,
        with_indices=True,
        # The suffix is part of the cache's key only if it is an argument.
        fn_kwargs={"source": source, "suffix": SUFFIX},
        remove_columns=rows.column_names,
        features=_features(),
        desc=f"Mapping {source}",
    )


def load(path: str) -> Any:
    """Load the rows of a file, a directory or a name on the hub."""
    import datasets

    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix not in FILES:
            raise UsageError(f"{path} is not a dataset.", f"Give one of {', '.join(FILES)}.")
        return datasets.load_dataset(FILES[local.suffix], data_files=str(local))["train"]
    if path.startswith(("/", ".", "~")) and not local.is_dir():
        raise UsageError(f"{path} does not exist.", "Give a file, a directory or a hub name.")
    if (local / "state.json").exists():
        return datasets.load_from_disk(str(local))
    splits = datasets.load_dataset(str(local) if local.is_dir() else path)
    return splits["train"] if "train" in splits else next(iter(splits.values()))


def _features() -> Any:
    """Return the column types of a mapped row; datasets would infer different ones per source."""
    from datasets import Features, Value

    text = Value("string")
    return Features(
        {
            "data_source": text,
            "prompt": [{"role": text, "content": text}],
            "ability": text,
            "reward_model": {"ground_truth": text},
            "extra_info": {"index": Value("int64")},
            "agent_name": text,
        }
    )


def write_parquet(entry: str, path: Path) -> int:
    """Map an entry into a file for verl's own dataset class; return the number of rows."""
    rows = load_mapped(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(str(path))
    return len(rows)
