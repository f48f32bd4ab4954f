"""The sharding rules, one module for each family of operators; `dtensor.rules` imports them all."""
