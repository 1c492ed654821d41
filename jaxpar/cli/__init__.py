"""The ``jaxpar`` command: one module and one function a subcommand."""
