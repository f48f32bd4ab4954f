"""How one operator runs on DTensors: what may stand beside them, which rule and layout, what is redistributed, what
becomes of views and writes."""
