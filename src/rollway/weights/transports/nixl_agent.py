# temporary: moved to rollway.weights.transports.nixl.agent
from rollway.weights.transports.nixl.agent import _PACKAGES as _PACKAGES
from rollway.weights.transports.nixl.agent import import_nixl as import_nixl
