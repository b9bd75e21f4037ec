"""A light Dynamo engine for tests: a numpy forward behind Dynamo's real planes and admin routes.

It starts in about a second and weighs little, so a test can have many of them. What it answers is
exact, and it has the faults of the engine it stands for.
"""

from __future__ import annotations

import os

# Before numpy loads its BLAS: threads gain nothing on matrices this small, and fleets would have
# a pool of them for every process.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
