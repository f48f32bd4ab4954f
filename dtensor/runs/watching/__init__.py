"""Watching: replicas compared, and NaN found, while a program trains."""
