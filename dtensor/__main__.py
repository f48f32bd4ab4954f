"""`python -m dtensor`, the same as the `dtensor` command."""

from .tools.cli import main

if __name__ == "__main__":
    main(prog_name="dtensor")
