# temporary: moved to rollway.weights.planning.sources
from rollway.weights.planning.sources import *  # noqa: F403
