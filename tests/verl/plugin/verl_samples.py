"""Samplers of verl that record the trainer's samples, in addition to `verl_record`."""

from __future__ import annotations

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl_record import note

_FIELDS = ["prompts", "responses", "response_mask", "rollout_log_probs"]


class _Recorded:
    def sample(self, global_steps, partition_id, batch_size):
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=_FIELDS
        )
        columns = [[row.tolist() for row in data[field].unbind()] for field in _FIELDS]
        for tag, prompt, response, mask, logprobs in zip(batch.tags, *columns, strict=True):
            note(
                "sample",
                trained_in=global_steps,
                prompt=prompt,
                response=response,
                mask=mask,
                logprobs=logprobs,
                steps=[tag["min_global_steps"], tag["max_global_steps"]],
            )
        return batch, metrics


class Sync(_Recorded, ReplayBuffer):
    """For `trainer_mode=sync`."""


class Async(_Recorded, ReplayBufferAsync):
    """For the two other modes."""
