"""Which parameters does a run begin with that starts from another one?"""

import tempfile
from pathlib import Path

import jax

from jaxpar.checkpoint.exports import import_safetensors
from jaxpar.checkpoint.former_names import as_stored
from jaxpar.checkpoint.places import place_of
from jaxpar.checkpoint.processes import from_first
from jaxpar.engine.engine import Engine
from jaxpar.launch.object_stores import is_url
from jaxpar.launch.own_files import is_file, names_in, read_json
from jaxpar.training.record import FILE, checkpoints_of
from jaxpar.tree import named_leaves

_SAFETENSORS = "*.safetensors"


def find_parameters(origin: Path | str) -> Path | str:
    """The folder of checkpoints, or of safetensors, that a path stands for.

    Args:
      origin: a run's folder, a folder of checkpoints, also of a bucket, or a file or
        folder of safetensors.

    Raises:
      FileNotFoundError: if it holds none of them.
      ValueError: if it holds safetensors, and the run has several processes.
    """
    if is_url(origin):
        if place_of(origin).complete():
            return origin
        raise _none_in(origin)
    origin = Path(origin)
    for folder in (checkpoints_of(origin, read_json(origin / FILE)), origin):
        if place_of(folder).complete():
            return folder
    names = map(Path, names_in(origin))
    if any(each.match(_SAFETENSORS) for each in names) or (
        origin.match(_SAFETENSORS) and is_file(origin)
    ):
        if jax.process_count() > 1:
            raise ValueError(
                f"init_from={str(origin)!r} has safetensors, which a run of several "
                "processes can't begin with: make a checkpoint of them, by `jaxpar "
                f"ckpt import FOLDER {origin}`, and give that folder."
            )
        return origin
    raise _none_in(origin)


def _none_in(origin: Path | str) -> FileNotFoundError:
    return FileNotFoundError(
        f"init_from={str(origin)!r} has no parameters: give the folder of a run, of "
        "checkpoints, or of .safetensors files."
    )


def load_parameters(engine: Engine, origin: Path | str) -> int | None:
    """Give an engine that has not trained the parameters of another run.

    Trained parameters that the other run has none of, such as adapters over its model,
    keep their initial values.

    Args:
      engine: of the same parameters.
      origin: as `find_parameters` takes it.

    Returns:
      The step that they were saved at; None for safetensors.

    Raises:
      FileNotFoundError: if there are none.
      ValueError: if they are of another model, or as `find_parameters` says.
      DamagedError: if the files are damaged.
    """
    found = from_first(lambda: str(find_parameters(origin)))
    if place_of(found).complete():
        return _restore(engine, found)
    with tempfile.TemporaryDirectory() as own:
        imported = Path(own, "imported")
        import_safetensors([Path(found)], imported)
        _restore(engine, imported)
    return None


def _restore(engine: Engine, checkpoints: Path | str) -> int:
    """Restore the newest valid checkpoint's parameters; its step."""
    place = place_of(checkpoints)
    step = from_first(lambda: place.choose(None, {})["step"])
    stored = place.step(step).manifest().leaves
    own = {name: name for name in named_leaves(engine.placement.structs())}
    found = as_stored(own, engine.placement.former, stored)
    parts = [
        f"{part}/"
        for part in ("params", "frozen")
        if any(name.startswith(f"{part}/") for name in own)
    ]
    # Where it has nothing of a part, such as new adapters, that part stays as it is.
    known = [name for name in own if found[name] in stored]
    taken = [part for part in parts if any(name.startswith(part) for name in known)]
    only = [f"{part}*" for part in taken or parts]
    return engine.restore(checkpoints, step=step, only=only)
