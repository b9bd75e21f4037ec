"""Plans kept between steps: a trainer that has not changed is planned for once.

A plan is known by a signature of all that it follows from: who offers which pieces of which
tensors, who wants which, where they run, and what things cost. When any of it changes, and a
rank that left or a new topology does, the signature is another and so is the plan.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from rollway.weights.planning.costs import Costs
from rollway.weights.planning.fanout import Tree
from rollway.weights.planning.holdings import Held, Source
from rollway.weights.planning.plan import Receiver, plan
from rollway.weights.planning.transfers import Plan
from rollway.weights.planning.wants import Parts, Wants


def signature(
    sources: Sequence[Source],
    receivers: Sequence[Receiver],
    wants: Wants,
    costs: Costs | None = None,
    fanout: Tree | None = None,
) -> str:
    """Equal for equal plans, in this process as in any other."""
    digest = hashlib.sha256()
    for line in _facts(sources, receivers, wants):
        digest.update(f"{line}\n".encode())
    digest.update(f"{costs or Costs()}\n{fanout}".encode())
    return digest.hexdigest()


def _facts(
    sources: Sequence[Source], receivers: Sequence[Receiver], wants: Wants
) -> Iterator[object]:
    numbers: dict[int, int] = {}  # what is shared by many tensors is told once
    for source in sources:
        yield "source", source.name, source.place.node, source.place.device
        for name, offer in source.offers.items():
            holding = offer.holding
            if id(holding) not in numbers:
                numbers[id(holding)] = len(numbers)
                yield holding.dtype, holding.shape, *map(_held, holding.held)
            yield name, offer.names, numbers[id(holding)]
    for receiver in receivers:
        yield "receiver", receiver.name, receiver.place.node, receiver.place.device
    for name, several in wants.items():
        for want in several:
            if id(want.parts) not in numbers:
                numbers[id(want.parts)] = len(numbers)
                yield _told(want.parts)
            yield name, want.target, want.dtype, numbers[id(want.parts)]


def _held(held: Held) -> tuple[object, ...]:
    return held.tensor, held.box.start, held.box.stop, held.at, held.transposed


def _told(parts: Parts) -> list[object]:
    return [part and (part.box.start, part.box.stop, part.at, part.shape) for part in parts]


class PlanCache:
    """The last few plans, by signature."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.made = 0
        """How many times a plan was not there and had to be made."""
        self._plans: OrderedDict[str, Plan] = OrderedDict()

    def plan(
        self,
        sources: Sequence[Source],
        receivers: Sequence[Receiver],
        wants: Wants,
        costs: Costs | None = None,
        *,
        fanout: Tree | None = None,
    ) -> Plan:
        """As `planning.plan.plan`, which is asked only when something has changed."""
        key = signature(sources, receivers, wants, costs, fanout)
        found = self._plans.get(key)
        if found is None:
            found = plan(sources, receivers, wants, costs, fanout=fanout)
            self.made += 1
        self._plans[key] = found
        self._plans.move_to_end(key)
        while len(self._plans) > self.size:
            self._plans.popitem(last=False)
        return found

    def clear(self) -> None:
        """Forget all plans, for example when the engines were started anew."""
        self._plans.clear()
