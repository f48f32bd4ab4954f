"""What torch does not declare public of optimizers, and of steps that they are part of."""
