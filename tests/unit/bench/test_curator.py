"""The report of `rollway bench curator`; the measurement itself needs Curator's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollway.bench.curator import CuratorReport, Round, Rows, bench_curator, format_figures
from rollway.errors import UsageError

ROUNDS = [
    Round("curator", 20.0, 4.0),
    Round("rollway", 10.0, 2.0, [99.0], [100.0]),
    Round("rollway", 12.0, 3.0, [97.0], [100.0]),
    Round("rollway", 11.0, 2.0, [98.0], [100.0]),
]
ROWS = Rows(curator=[100.0, 50.0, 100.0], rollway=[99.0, 50.0, 97.0])


def test_ratios_are_of_medians() -> None:
    figures = CuratorReport(ROUNDS, ROWS).as_json()
    assert figures["ready"] == 11.0 / 20.0
    assert figures["stop"] == 0.5


def test_rows_are_compared_within_a_pair() -> None:
    figures = CuratorReport(ROUNDS, ROWS).as_json()
    assert figures["rows_ratios"] == [0.99, 1.0, 0.97] and figures["rows"] == 0.99


def test_clients_are_compared_within_a_pair() -> None:
    """Across pairs, a faster machine in one of them would look like a faster client."""
    result = Round("rollway", 1, 1, [90.0, 180.0, 45.0], [100.0, 200.0, 50.0])
    figures = CuratorReport([ROUNDS[0], result], ROWS).as_json()
    assert figures["client_ratios"] == [0.9] * 3 and figures["client"] == 0.9
    assert (figures["client_rate"], figures["bare_rate"]) == (90.0, 100.0)


def test_the_table_names_each_limit() -> None:
    table = format_figures(CuratorReport(ROUNDS, ROWS).as_json())
    assert "| ready, s | 20.0 | 11.0 | 0.55 | at most 1.0 |" in table
    assert "| rows/s* | 100.0 | 97.0 | 0.99 | at least 0.98 |" in table
    assert "| 100.0 | 98.0 | 0.98 | at least 0.95 |" in table
    assert table.count("median of 3 pairs of runs that follow each other") == 2
    assert table.endswith("half of them are between 0.97 and 0.99.")


def test_a_missing_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no interpreter .*missing"):
        bench_curator(tmp_path / "missing", tmp_path, tmp_path, tmp_path, print)
