"""The control: a run whose new weights never reach the engines."""

from __future__ import annotations

from rollway.integrations.verl.stream import drained
from rollway.integrations.verl.updates import Publishing


async def _send_nothing(self, weights, pool, step):
    await drained(weights)
    await pool.set_global_steps.remote(step)
    return {}


async def _send_no_adapter(self, weights, pool, step, config):
    await _send_nothing(self, weights, pool, step)


Publishing.send = _send_nothing
Publishing.send_adapter = _send_no_adapter
