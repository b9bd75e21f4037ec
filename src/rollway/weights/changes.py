# temporary: moved to rollway.weights.digest.changes
from rollway.weights.digest.changes import Comparison as Compared
from rollway.weights.digest.changes import compare_pairs as compared
from rollway.weights.digest.changes import encode_gaps as gaps
from rollway.weights.digest.changes import find_changes as changed
from rollway.weights.digest.changes import split_planes as planes
from rollway.weights.digest.changes import zigzag as zigzag

__all__ = ["Compared", "changed", "compared", "gaps", "planes", "zigzag"]
