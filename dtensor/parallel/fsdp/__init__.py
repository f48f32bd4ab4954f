"""Full sharding: parameters live sharded over data axes and are gathered for their use."""
