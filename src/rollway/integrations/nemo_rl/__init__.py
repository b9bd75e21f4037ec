"""NeMo-RL generates on Rollway: `policy.generation.backend: dynamo` for any Dynamo stack.

`rollway nemo-rl run SCRIPT.py --config …` runs a script of NeMo-RL, unchanged; docs/nemo-rl.md has
the other ways. Nothing here imports NeMo-RL, Ray or torch until it is used: rollout actors restore
a `Generation` in environments that have other packages.
"""
