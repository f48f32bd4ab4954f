"""What all passes stand on: reading and writing FX graphs, their text, their validity, replay on simulated ranks."""
