"""The one place where rows of DAPO-Math-17k, AIME 2024 and AIME 2025 become rows of verl.

    mapped("BytedTsinghua-SIA/DAPO-Math-17k")     # from the Hugging Face hub
    mapped("/data/aime_2025")                     # the same source, from a directory
    mapped("aime_2025:/data/validation.parquet")  # a path that does not tell

Whatever the source, a mapped row has the same columns, so they can be mixed. `verl_dataset.py` maps
while verl loads; `write_parquet` is for those who want files.
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
"""The `data_source` of each, under which verl reports its scores, and where the hub has it."""
ALIASES = {
    "math_dapo": ("mathdapo", "dapomath", "dapomath17k", "dapomath17kprocessed", "dapo"),
    "aime_2024": ("aime2024", "aime24"),
    "aime_2025": ("aime2025", "aime25"),
}
"""What a part of a path may be called, without case, signs and endings."""
FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def recognise(entry: str) -> tuple[str, str]:
    """The source of an entry of `data.train_files`, and where to load it from."""
    name, colon, path = entry.partition(":")
    if colon and (known := _known(name)):
        return known, path
    if re.fullmatch(r"[\w-]+", entry) and (known := _known(entry)) and not Path(entry).exists():
        return known, SOURCES[known]
    for part in reversed(re.split(r"/|--", entry)):  # the hub's cache has datasets--owner--name
        if known := _known(part):
            return known, entry
    raise UsageError(
        f"Which dataset is `{entry}`?",
        f"Name its directory after one of {', '.join(SOURCES)}, or write `aime_2025:{entry}`.",
    )


def _known(part: str) -> str | None:
    plain = re.sub(r"(-\d+-of-\d+)?(\.\w+)?$", "", part.lower())  # shard-00000-of-00002.parquet
    plain = re.sub(r"[^a-z0-9]", "", plain)
    return next((source for source, names in ALIASES.items() if plain in names), None)


def map_row(
    row: Mapping[str, Any], index: int, source: str, suffix: str = SUFFIX
) -> dict[str, Any]:
    """One row, as verl wants it. A row that was mapped before stays as it is."""
    messages, answer = _problem(row, source)
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


def _problem(row: Mapping[str, Any], source: str) -> tuple[list[Mapping[str, str]], Any]:
    """The messages and the answer: DAPO has verl's columns, the two AIMEs a problem and an
    answer, which one of them writes with capitals."""
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


def mapped(entry: str) -> Any:
    """All rows of one entry, as a `datasets.Dataset`."""
    source, path = recognise(entry)
    rows = load(path)
    return rows.map(
        map_row,
        with_indices=True,
        # Given here so that rows cached for another suffix are not taken for these.
        fn_kwargs={"source": source, "suffix": SUFFIX},
        remove_columns=rows.column_names,
        features=features(),
        desc=f"Mapping {source}",
    )


def load(path: str) -> Any:
    """The rows of a file, a directory or a name on the hub."""
    import datasets

    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix not in FILES:
            raise UsageError(f"{path} is no dataset.", f"Give one of {', '.join(FILES)}.")
        return datasets.load_dataset(FILES[local.suffix], data_files=str(local))["train"]
    if path.startswith(("/", ".", "~")) and not local.is_dir():
        raise UsageError(f"{path} does not exist.", "Give a file, a directory or a hub name.")
    if (local / "state.json").exists():
        return datasets.load_from_disk(str(local))
    splits = datasets.load_dataset(str(local) if local.is_dir() else path)
    return splits["train"] if "train" in splits else next(iter(splits.values()))


def features() -> Any:
    """The columns of a mapped row and their types; without them each source would infer its own."""
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
    """Map an entry into a file that verl's own dataset class can load; returns the rows."""
    rows = mapped(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(str(path))
    return len(rows)
