"""What all passes build on: reading, writing, printing and verifying FX graphs, and running them on simulated ranks."""
