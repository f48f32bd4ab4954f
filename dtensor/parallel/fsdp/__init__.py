"""Full sharding: parameters are stored sharded over data axes and are gathered for use."""
