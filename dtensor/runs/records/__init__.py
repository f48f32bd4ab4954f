"""Records: what a run writes of every value, eager or compiled."""
