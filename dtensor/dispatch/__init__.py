"""How one operator runs on DTensors: which plain tensors may stand beside them, which rule and layouts apply, what is
redistributed, and how views and writes are handled."""
