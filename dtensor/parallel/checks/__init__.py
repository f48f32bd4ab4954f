"""Checks that detect a plan that is wrong for its model: sizes that do not fit, inputs or gradients that differ."""
