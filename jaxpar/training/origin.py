"""Which parameters does a run begin with that starts from another one?"""

import tempfile
from pathlib import Path

import jax

from jaxpar.checkpoint.exports import import_safetensors
from jaxpar.checkpoint.folder import complete_steps
from jaxpar.checkpoint.processes import from_first
from jaxpar.engine.engine import Engine
from jaxpar.tree import named_leaves

_SAFETENSORS = "*.safetensors"


def find_parameters(origin: Path) -> Path:
    """The folder of checkpoints, or of safetensors, that a path stands for.

    Args:
      origin: a run's folder, a folder of checkpoints, or a file or folder of
        safetensors.

    Raises:
      FileNotFoundError: if it holds none of them.
    """
    for folder in (origin / "checkpoints", origin):
        if folder.is_dir() and next(complete_steps(folder), None) is not None:
            return folder
    if origin.match(_SAFETENSORS) and origin.is_file():
        return origin
    if origin.is_dir() and any(origin.glob(_SAFETENSORS)):
        return origin
    raise FileNotFoundError(
        f"init_from={str(origin)!r} has no parameters: give the folder of a run, of "
        "checkpoints, or of .safetensors files."
    )


def load_parameters(engine: Engine, origin: Path, scratch: Path) -> int | None:
    """Give an engine that has not trained the parameters of another run.

    Args:
      engine: of the same parameters.
      origin: as `find_parameters` takes it.
      scratch: a folder on a shared disk for the time of the call.

    Returns:
      The step that they were saved at; None for safetensors.

    Raises:
      FileNotFoundError: if there are none.
      ValueError: if they are of another model.
      DamagedError: if the files are damaged.
    """
    found = find_parameters(origin)
    parts = engine.placement.structs()
    only = ["params/*", *(["frozen/*"] if named_leaves(parts.frozen) else [])]
    if next(complete_steps(found), None) is not None:
        return engine.restore(found, only=only)
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        # The one folder of process 0; the others read what it has written.
        imported = Path(from_first(lambda: own), "imported")
        if jax.process_index() == 0:
            import_safetensors([found], imported)
        engine.restore(imported, only=only)
        from_first(lambda: None)
    return None
