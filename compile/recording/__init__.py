"""What is recorded while programs are compiled: frames, graphs, collectives, files."""
