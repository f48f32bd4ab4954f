"""Simulated ranks: processes of this machine that a notebook, a shell or a script without torchrun works with.

simulate(n) -> Ranks -> one process a rank, each in `rank.rank_main`
a function -> by_value -> called on every rank -> PerRank, the values in the order of ranks
a cell     -> cells    -> run on every rank, in a namespace that stays
what ranks print       -> lines -> equal lines once, with the ranks that printed them
"""
