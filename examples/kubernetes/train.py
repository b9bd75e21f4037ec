"""examples/own_loop.py on a graph of a cluster: `python train.py dgd://NAMESPACE/NAME MODEL`."""

import sys
from pathlib import Path

import rollway

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from own_loop import train  # examples/own_loop.py

if __name__ == "__main__":
    with rollway.attach(sys.argv[1]) as stack:
        train(stack, sys.argv[2], range(1, 11))
