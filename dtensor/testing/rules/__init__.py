"""Brute-force checks of sharding rules over torch's operator database: that every candidate of a rule is right, and
that no right candidate is missing. `docs/operators.md` is generated from the same calls."""
