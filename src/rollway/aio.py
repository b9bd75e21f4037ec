"""The API for async code: the names of `rollway`, with coroutines where those block.

`up` and `attach` are those of `rollway`, to be entered by `async with`. `Conversation` never waits
for anything, and is the same class.

Example:
    async with rollway.aio.up(model="/models/policy", workers=2) as stack:
        async with stack.publisher() as weights:
            group = await stack.rollouts().generate(prompt_ids, n=8)
            await stack.refit(1, await weights.publish(1, model.named_parameters()))
"""

from rollway.api import attach, up
from rollway.fleet.fleet import Fleet
from rollway.publishing import AsyncPublisher as Publisher
from rollway.rollout.client import Rollouts
from rollway.rollout.conversation import Conversation
from rollway.rollout.teacher import Teacher
from rollway.stack_handle import Stack

__all__ = ["Conversation", "Fleet", "Publisher", "Rollouts", "Stack", "Teacher", "attach", "up"]
