# temporary: moved to rollway.weights.transports.delta
from rollway.weights.transports.delta.store import SharedMemory as SharedMemory
from rollway.weights.transports.delta.store import Store as Store
