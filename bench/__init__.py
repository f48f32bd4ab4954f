"""Benchmarks of this library against its peers; run `python -m bench` in the checkout.

    cases/       the measurements: wire, step, call, ...; each yields records
    record       one figure: our value, a peer's, their ratio and its spread, machine and versions; JSON lines
    table, plots markdown and plots from records
    models, plans, sides, limit/    the models, their sharding, the libraries, and the same written by hand
    ranks, namespaces, counting     where a case runs: processes, a slow link, one rank of many that only counts
    timing       interleaved rounds, medians, quartiles

A figure is a ratio to a peer that ran in the same processes, in interleaved rounds. If a peer cannot run something, a
record holds the reason. The library does not import this package.
"""
