"""What communicates: the redistribution operators and what starts them, the executor of plans, moves between meshes,
and the checks that ranks agree."""
