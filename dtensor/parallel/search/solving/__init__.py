"""The search as a mixed-integer program, and its solver."""
