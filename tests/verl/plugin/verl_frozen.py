"""The control: a run whose engines never receive new weights."""

from __future__ import annotations

from rollway.integrations.verl.verl_buckets import drain
from rollway.integrations.verl.weights import WeightSender


async def _send_nothing(self, weights, pool, step):
    await drain(weights)
    await pool.set_global_steps.remote(step)
    return {}


async def _send_no_adapter(self, weights, pool, step, config):
    await _send_nothing(self, weights, pool, step)


WeightSender.send = _send_nothing
WeightSender.send_adapter = _send_no_adapter
