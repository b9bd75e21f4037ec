"""`ReToolDataset`: verl's dataset, with rows that are mapped while they are loaded.

For `data.custom_cls`: `path=pkg://examples.retool.verl_dataset`,
`name=ReToolDataset`. `data.train_files` and `data.val_files` then accept hub names and local paths.
"""

from __future__ import annotations

import datasets
import numpy as np
from verl.utils.dataset.rl_dataset import RLHFDataset

from examples.retool.datasets import load_mapped


class ReToolDataset(RLHFDataset):  # type: ignore[misc]  # verl is not typed
    """Differs from verl's class only in how rows are read."""

    def _read_files_and_tokenize(self) -> None:
        rows = datasets.concatenate_datasets([load_mapped(str(entry)) for entry in self.data_files])
        if 0 < self.max_samples < len(rows):
            # `data.*_max_samples` must keep the rows that verl's own class would keep.
            if self.shuffle:
                random = np.random.default_rng(self.seed)
                chosen = random.choice(len(rows), size=(self.max_samples,), replace=False)
            else:
                chosen = np.arange(self.max_samples)
            rows = rows.select(chosen.tolist())
        self.dataframe = self.maybe_filter_out_long_prompts(rows)
