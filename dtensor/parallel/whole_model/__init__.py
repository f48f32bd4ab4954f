"""Sharding an unmodified model in one call, by patterns of its parameter names."""
