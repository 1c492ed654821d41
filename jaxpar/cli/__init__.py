"""The ``jaxpar`` command: one module and one function per subcommand."""

from jaxpar.lazy import load_modules

load_modules(globals())
