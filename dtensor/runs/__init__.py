"""Runs of a program: what every operator computed, where two runs part, and what ranks should hold alike.

`records` writes, on each rank, a fingerprint of every value of a step. `comparing` reads two such records and finds the
first operator whose difference rounding does not explain. `watching` compares replicas while a program trains.
"""
