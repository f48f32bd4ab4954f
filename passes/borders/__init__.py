"""What others need of a graph: torch's partitioner, Inductor, the other ranks, and a recorder."""
