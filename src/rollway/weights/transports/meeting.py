# temporary: a test of another room imports these names from here
from rollway.weights.transports.collective.rendezvous import read_location as read_where

__all__ = ["read_where"]
