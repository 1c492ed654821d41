"""How does a recipe start: its flags are read, and a wrong one is answered in a line.

Flags are those of `jaxpar.config`, plus the search for a mesh.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxpar import config as flags
from jaxpar.config import Config
from jaxpar.launch.heartbeat import own_heartbeat
from jaxpar.launch.worker_environment import current
from jaxpar.training.writers import writers_of

_WRONG = (ValueError, TypeError, OSError, ImportError)
"""Errors before the first step that mean that a setting can't work."""

_OF_JAX = "JAX_TRACEBACK_FILTERING"
"""In a note that jax adds to errors, about frames that are not shown here anyway."""

_TRACEBACK = "--traceback"
_HELP = f"{_TRACEBACK} shows where an error comes from."


def run_recipe(
    main: Callable[[Config], None],
    config: type[Config],
    description: str | None,
    args: Sequence[str] | None = None,
) -> None:
    """Read a recipe's flags, and run it; a wrong setting is answered in one line.

    Args:
      main: the recipe.
      config: a frozen dataclass, every field with a default.
      description: what the recipe does, for ``--help``.
      args: the arguments; None for the process's own.

    Raises:
      SystemExit: for ``--help`` (0) and for errors (2), after printing the message. An
        error after the first step has a traceback.
    """
    given = list(sys.argv[1:] if args is None else args)
    others = [word for word in given if word != _TRACEBACK]
    described = "\n\n".join(filter(None, (description, _HELP)))
    chosen = parse(config, described, others)
    try:
        writers_of(chosen)
        main(chosen)
    except _WRONG as error:
        is_wrong = own_heartbeat().phase in ("start", "restore")
        # Its launcher prints a worker's error once for all.
        if others != given or current() is not None or not is_wrong:
            raise
        notes = [x for x in getattr(error, "__notes__", ()) if _OF_JAX not in x]
        said = "\n".join([str(error), *notes])
        name = Path(sys.argv[0]).name
        print(f"{name}: {said}\n({_TRACEBACK} shows where)", file=sys.stderr)
        raise SystemExit(2) from None


def parse(
    config: type[Config],
    description: str | None,
    args: Sequence[str] | None = None,
    *,
    prog: str | None = None,
) -> Config:
    """Read a recipe's config from the command line.

    Field names are flags (``--mesh.data 2``), docstrings are the help. ``--mesh auto
    --target h200:1x8`` selects the fastest mesh for those devices, with the ZeRO stage,
    micro-batches and schedule found for it, as ``jaxpar plan --search`` does.

    Args:
      config: a frozen dataclass, every field with a default.
      description: what the program does, for ``--help``.
      args: the arguments; None for the process's own.
      prog: the program's name; None for the process's own.

    Returns:
      The config.

    Raises:
      SystemExit: for ``--help`` (0) and for errors (2), after printing the message.

    Example:
      >>> from jaxpar.mesh import MeshShape
      >>> parse(MeshShape, None, ["--data", "2"])
      MeshShape(data=2, pipe=1, tensor=1)
    """
    return flags.parse(config, description, args, prog=prog, search=_search)


def _search(recipe: Path, target: str, others: Sequence[str]) -> list[str]:
    """Search a recipe's mesh, in a subprocess that prints its progress."""
    with tempfile.TemporaryDirectory(prefix="jaxpar-mesh-") as folder:
        file = Path(folder, "search.json")
        command = [sys.executable, "-m", "jaxpar", "plan", str(recipe), "--search"]
        command += ["--target", target, "--json", str(file), "--", *others]
        if subprocess.run(command, check=False).returncode:
            print(
                "--mesh auto: no mesh was found; the lines above list what was tried.",
                file=sys.stderr,
            )
            raise SystemExit(2)
        return json.loads(file.read_text())["ranking"][0]["flags"]
