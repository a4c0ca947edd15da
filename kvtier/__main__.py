"""`python -m kvtier`: the command line, also where the command `kvtier` is not on the path."""

from kvtier.tools.cli import main

main()
