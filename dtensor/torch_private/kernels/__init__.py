"""C++ kernels of Inductor: how they are built, and how their libraries are kept."""
