"""The DTensor: the class, how DTensors are made, and what is caught above it (composite operators, control flow)."""
