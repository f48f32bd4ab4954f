"""A whole training step as one compiled graph."""
