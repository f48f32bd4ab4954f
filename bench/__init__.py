"""Benchmarks, side by side with their peers: `python -m bench` from the checkout.

    cases/       what is measured: wire, step, call, ...; each gives records
    record       one figure: ours, a peer's, their ratio and its spread, machine and versions; JSON lines
    table, plots markdown and pictures from records
    models, plans, sides, limit/    what is trained, how it is sharded, by whom, and the same by hand
    ranks, namespaces, counting     where it runs: processes, a slow link, one rank of many that only counts
    timing       interleaved rounds, medians, quartiles

A figure is a ratio against a peer that ran in the same processes, in rounds that take turns. What a peer cannot run is
a record too, with the reason. Nothing here is imported by the library.
"""
