"""`ReToolDataset`: verl's dataset, whose rows are mapped while they are loaded.

For `data.custom_cls`: `path=pkg://rollway.integrations.verl.retool.verl_dataset`,
`name=ReToolDataset`. Then `data.train_files` and `data.val_files` take names on the hub and local
paths alike.
"""

from __future__ import annotations

import datasets
import numpy as np
from verl.utils.dataset.rl_dataset import RLHFDataset

from rollway.integrations.verl.retool.datasets import mapped


class ReToolDataset(RLHFDataset):  # type: ignore[misc]  # verl is not typed
    """Differs from verl's only in where rows come from."""

    def _read_files_and_tokenize(self) -> None:
        rows = datasets.concatenate_datasets([mapped(str(entry)) for entry in self.data_files])
        if 0 < self.max_samples < len(rows):
            rows = rows.select(self._chosen(len(rows)))
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def _chosen(self, total: int) -> list[int]:
        """Which rows `data.*_max_samples` leaves; the same ones as verl would take."""
        if not self.shuffle:
            return list(range(self.max_samples))
        random = np.random.default_rng(self.seed)
        chosen: list[int] = random.choice(total, size=(self.max_samples,), replace=False).tolist()
        return chosen
