"""verl on Rollway: `actor_rollout_ref.rollout.name=dynamo`.

register            loaded by `import verl`; registers the classes below
spec                the user's options; verl's config as the spec of a stack
replica, pool       verl's replicas; the one actor that runs their common stack
requests            requests in flight, and those that wait while engines cannot serve them;
                    a log of requests and their cache hits
generation          a request of verl as a rollout, and back
weights             new weights from the trainer's ranks; the versions of a pool, and its updates
adapter             the rollout as a rank of verl's trainer sees it
checkpoint_engine   the same for engines that do not share the trainer's GPUs
verl_buckets        verl's iterator of weights; weights sent rank by rank, with verl's own sender
nodes               workers on other nodes; addresses of replicas and of metrics
fallback            verl's own rollout if the stack does not start
router              keeps turns of a trajectory and rollouts of a prompt on one worker
"""
