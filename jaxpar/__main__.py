"""``python -m jaxpar``: the command, where its script is not on the path."""

from jaxpar.cli.main import main

main()
