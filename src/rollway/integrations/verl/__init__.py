"""verl on Rollway: `actor_rollout_ref.rollout.name=dynamo`.

register            loaded by `import verl`; registers the classes below
options, spec       the user's options; verl's config as the spec of a stack
replica, pool       verl's replicas; the one actor that runs their common stack
requests            requests in flight, and those that wait while engines cannot serve them
generation          a request of verl as a rollout, and back
weights             the versions of a pool, and updates to new ones
adapter, publish    new weights from the trainer's ranks
checkpoint_engine   the same for engines that do not share the trainer's GPUs
weight_stream       verl's iterator of weights, for a publisher on another thread
verl_buckets        weights sent rank by rank, with verl's own sender
nodes, tcp_proxy    workers on other nodes; an address for each replica
fallback            verl's own rollout if the stack does not start
request_log         requests and their cache hits
prometheus          the addresses of metrics
router              keeps turns of a trajectory and rollouts of a prompt on one worker
"""
