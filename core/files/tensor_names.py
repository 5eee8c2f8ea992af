"""The tensors of a draft that have a meaning beyond its own layers."""

TARGET_HEAD = ("embed_tokens.weight", "lm_head.weight")
"""What a draft that uses its target's embedding and head leaves out of its file."""
