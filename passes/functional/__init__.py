"""Between functional collectives and redistribution operators: raising the former, lowering the latter."""
