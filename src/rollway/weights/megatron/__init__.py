"""Megatron-Core's layout of a model: how its ranks shard and fuse the Hugging Face tensors."""
