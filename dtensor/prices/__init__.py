"""What things cost, in bytes, operations and seconds: operators, kernels that compilers make of them, collectives."""
