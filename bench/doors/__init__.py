"""Models of transformers as they are, and the doors by which a user can have them sharded.

`subjects` has the models, made small from their configurations, and what is written by hand for each; `doors` has the
doors, each of which shards a model. The case `bench.cases.doors` counts and times them.
"""
