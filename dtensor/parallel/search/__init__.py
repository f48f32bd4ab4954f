"""Finds placements: a step as a tape, its price under any plan, and the cheapest plan by integer programming."""
