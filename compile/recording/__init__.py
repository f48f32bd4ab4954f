"""What is noted while something is compiled: frames, graphs, collectives, files."""
