"""The sharding rules, one file for each family of operators. `dtensor.rules` collects them."""
