"""What does a Hugging Face folder hold: its config, and slices of its tensors?"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


class Tensors:
    """The tensors of a folder's safetensors, read slice by slice.

    Args:
      folder: with ``*.safetensors``, in one file or in several.

    Raises:
      FileNotFoundError: if it holds none.
      ValueError: if a file is damaged, or a name is in two files.
    """

    def __init__(self, folder: Path):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"{str(folder)!r} has no .safetensors files. Of a model that is saved "
                "as .bin files transformers makes them: save_pretrained(folder)."
            )
        self._files: dict[str, Any] = {}
        for path in files:
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 - it is not a dict
                if name in self._files:
                    raise ValueError(f"{str(path)!r}: {name!r} is in another file too.")
                self._files[name] = file

    @property
    def names(self) -> frozenset[str]:
        """All tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor, in its dtype.

        Args:
          name: of the tensor.
          index: a slice of each dim, of step 1.
        """
        found = self._files[name].get_slice(name)
        return np.asarray(found[index] if index else found[...])


def _open(path: Path) -> Any:
    # Not at the top: machines that only measure may lack it, and import the models.
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        return safe_open(path, "np")
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not safetensors ({error}).") from error


def read_config(folder: Path) -> Mapping[str, Any]:
    """The config of a model, as its authors wrote it.

    Raises:
      FileNotFoundError: if there is none.
      ValueError: if it is not JSON, or does not say which model it is of.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {CONFIG}: give the folder of a model of Hugging "
            "Face, with its config and its .safetensors files."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}).") from error
    if not isinstance(found, dict) or "model_type" not in found:
        raise ValueError(f"{str(path)!r} does not say which model_type it is of.")
    return found
