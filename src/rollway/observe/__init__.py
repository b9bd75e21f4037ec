"""What a stack does, recorded, and shown: see docs/observe.md."""
