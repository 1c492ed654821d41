"""How is what rich prints had as a string, in a notebook as elsewhere?"""

import io
from collections.abc import Callable

from rich.console import Console


def as_plain_text(
    print_on: Callable[[Console], None], *, width: int | None = None
) -> str:
    """What a function prints, without colours.

    Args:
      print_on: prints on the console that it is given.
      width: in characters; None for the terminal's.

    Example:
      >>> as_plain_text(lambda console: console.print("[bold]12[/bold] s"))
      '12 s'
    """
    out = io.StringIO()
    # In a notebook a console shows what is printed, and its file stays empty.
    print_on(Console(file=out, width=width, color_system=None, force_jupyter=False))
    return out.getvalue().rstrip("\n")
