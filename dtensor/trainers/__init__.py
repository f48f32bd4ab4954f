"""Sharded models in the training loops of others: accelerate, transformers' Trainer and TRL's, Lightning.

Each module here imports the package it is for, and `import dtensor` imports none of them. They say the same things in
the words of each package: who reads which part of a batch, that nobody wraps the model, how gradients are accumulated
and clipped, and what is written to disk.
"""

from .batch_parts import BatchParts, batch_parts

__all__ = ["BatchParts", "batch_parts"]
