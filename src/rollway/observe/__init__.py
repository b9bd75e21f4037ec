"""What a stack records, and what a trainer adds to it: `step` and `note_mismatch`."""

from rollway.observe.steps import Step, end_step, note_mismatch, step

__all__ = ["Step", "end_step", "note_mismatch", "step"]
