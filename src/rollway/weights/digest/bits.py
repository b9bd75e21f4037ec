# temporary: moved to rollway.weights.digest.checksums
from rollway.weights.digest.checksums import *  # noqa: F403
