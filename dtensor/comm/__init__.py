"""Communication: the redistribution operators and the operators that start their collectives, the executor of plans,
moves between meshes, and the checks that ranks agree."""
