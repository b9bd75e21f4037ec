# temporary: moved to rollway.weights.inspect
from rollway.weights.inspect import *  # noqa: F403
