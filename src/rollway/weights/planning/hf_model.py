# temporary: moved to rollway.weights.planning.scenario
from rollway.weights.planning.scenario import *  # noqa: F403
