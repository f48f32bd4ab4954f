"""Runs of a program: records of what every operator computed, and where two of them part.

A `Recorder` writes, on each rank, a fingerprint of every value of a step (`recorder`, `fingerprint`, `storage`).
`values` reads the files of all ranks and combines the fingerprints of shards into those of global tensors. `comparison`
aligns two records and finds the first operator whose difference rounding does not explain. `watch` compares replicas
while a program trains.
"""
