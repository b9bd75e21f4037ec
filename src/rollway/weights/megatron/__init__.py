"""Megatron-Core's own layout of a model: how its ranks cut and fuse what Hugging Face names."""
