"""Training runs while they run: what is observed of a model and its optimizers between the steps."""
