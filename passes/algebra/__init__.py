"""The algebra of collectives: one rewrite a file, each exact, run to a fixpoint."""
