"""Tensor parallelism by a plan: a dict from module names to styles."""
