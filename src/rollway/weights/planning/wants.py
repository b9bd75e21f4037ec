# temporary: moved to rollway.weights.planning.targets
from rollway.weights.planning.targets import *  # noqa: F403
