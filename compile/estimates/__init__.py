"""What a graph sends and when, and what that may cost: simulated, in seconds, bytes and formulas."""
