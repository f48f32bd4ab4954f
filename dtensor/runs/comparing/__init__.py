"""Comparing: two records, value by value, to the first difference that nothing explains."""
