"""prime-rl: a drop-in inference server in front of a fleet (docs/prime-rl.md).

    orchestrator ── rollouts, admin calls ──► serve ── ids ──► Dynamo frontend
    trainer ── broadcasts/step_N ──► files ──► workers, by Fleet.refit

Read `routes.py` (what is answered), `updates.py` (pause, update, resume), `generate.py` (tokens).
"""
