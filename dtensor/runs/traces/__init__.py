"""Traces: what ran when on each rank, for Perfetto, with collectives by their names in this library."""
