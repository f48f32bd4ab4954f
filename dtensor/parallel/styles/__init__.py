"""Tensor parallelism by a plan: module name -> style."""
