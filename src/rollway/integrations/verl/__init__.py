"""verl on Rollway: `actor_rollout_ref.rollout.name=dynamo`.

register            what `import verl` loads; names the classes below
options, settings   what a user says, as a Rollway stack
replica, pool       verl's replicas; the one actor that runs their common stack
nodes               workers of the pool on other nodes
forward             an address for each replica, which leads to the one frontend
gate                where requests wait while the engines cannot take them
fallback            verl's own rollout where the stack does not start, if asked for
generation          a verl request as a rollout, and back
adapter, updates    new weights from the trainer's ranks
stream, handover    verl's iterator for a publisher; verl's own way, rank by rank
checkpoint_engine   the same for engines that do not share the trainer's machines
traffic, targets    what was asked and answered; where the metrics are
router              keeps the turns of a trajectory, and the rollouts of a prompt, together
"""
