# temporary: moved to rollway.weights.digest.gpu
from rollway.weights.digest.gpu import *  # noqa: F403
