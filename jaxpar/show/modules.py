"""What does each module of an engine's model cost in a step?"""

from rich.table import Table

from jaxpar.engine.compiled_step import CompiledStep
from jaxpar.training.module_table import as_table, read_modules


def table(engine: CompiledStep, *, depth: int = 3) -> Table:
    """Make a table of the modules: parameters, FLOPs and bytes of a step.

    ``jaxpar.train(..., profile="10:15")`` measures the time, too.

    Args:
      engine: the engine, or one of its losses; compiled if it is not yet.
      depth: how many levels of modules to show.

    Returns:
      For ``rich.print``.
    """
    return as_table(read_modules(engine).rows(), depth=depth)
