"""The ``jaxpar`` command: one module and one function per subcommand."""
