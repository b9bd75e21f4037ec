"""The control: a run whose new weights never reach the engines."""

from __future__ import annotations

from rollway.integrations.verl.stream import drained
from rollway.integrations.verl.updates import Publishing


async def _send_nothing(self, weights, pool, step):
    await drained(weights)
    await pool.set_global_steps.remote(step)
    return {}


Publishing.send = _send_nothing
