"""An unmodified model, sharded in one call by the names of its parameters."""
