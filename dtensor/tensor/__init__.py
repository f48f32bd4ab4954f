"""The DTensor class, the functions that create DTensors, and the operators intercepted above autograd."""
