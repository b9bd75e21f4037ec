"""ReTool on Rollway: a model learns to solve mathematics with a code interpreter, under verl."""
