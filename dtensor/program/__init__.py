"""The program that runs: its environment variables, whose code a line is, files written whole, and what takes long."""
