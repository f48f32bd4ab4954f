"""The algebra of collectives: one rewrite per file, each with its declared exactness, run to a fixpoint."""
