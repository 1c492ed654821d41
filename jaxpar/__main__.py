"""``python -m jaxpar``: the command line, if its script is not on the path."""

from jaxpar.cli.main import main

main()
