"""How is a model written as others publish it: files of bounded size, and an index."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.models.hf.leaves import Leaf
from jaxpar.models.hf.tensors import CONFIG, INDEX

FILE_BYTES = 4 << 30
"""Default size of one file, at most."""


def write_folder(
    arrays: Iterable[tuple[str, np.ndarray]],
    leaves: Mapping[str, Leaf],
    hf: Mapping[str, Any],
    out: Path,
    *,
    dtype: str = "float32",
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write leaves as a published model.

    Args:
      arrays: paths of parameters and their values, one after the other.
      leaves: path -> what the leaf is made of.
      hf: the published config; its vocab_size says how many rows are written.
      out: a new folder.
      dtype: of the tensors: "float32" or "bfloat16".
      file_bytes: largest size of a file; a larger tensor gets a file of its own.

    Raises:
      ValueError: if `out` exists, a leaf is not the model's, or one is missing.
    """
    if out.exists():
        raise ValueError(f"out={str(out)!r} exists already; name a new folder.")
    # What can't be written whole leaves no folder of that name.
    unfinished = out.with_name(f"{out.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    writer, missing = _Writer(unfinished, file_bytes), set(leaves)
    joined: dict[str, dict[int, np.ndarray]] = {}
    for name, value in arrays:
        if name not in missing:
            raise ValueError(f"{name} is not a parameter of this {hf['model_type']}.")
        missing.remove(name)
        whole = value.astype(jnp.dtype(dtype))
        for piece, part in leaves[name].split(whole, hf.get("vocab_size")):
            number, of = piece.part
            parts = joined.setdefault(piece.name, {})
            parts[number] = part
            if len(parts) == of:
                own = [each for _, each in sorted(joined.pop(piece.name).items())]
                writer.add(
                    piece.name,
                    np.concatenate(own, piece.part_dim) if of > 1 else own[0],
                )
    if missing:
        raise ValueError(f"{', '.join(sorted(missing)[:5])}: missing parameters.")
    writer.close()
    published = {**hf, "torch_dtype": dtype, "dtype": dtype}
    text = json.dumps(published, indent=2) + "\n"
    (unfinished / CONFIG).write_text(text, encoding="utf-8")
    unfinished.rename(out)


class _Writer:
    """Writes tensors into files of bounded size, and their index."""

    def __init__(self, out: Path, file_bytes: int):
        self._out, self._most = out, file_bytes
        self._held: dict[str, np.ndarray] = {}
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: np.ndarray) -> None:
        """Take a tensor, and write a file if it is full."""
        held = sum(each.nbytes for each in self._held.values())
        if self._held and held + tensor.nbytes > self._most:
            self._flush()
        self._held[name] = np.ascontiguousarray(tensor)
        self._total += tensor.nbytes

    def close(self) -> None:
        """Write what is held, name the files, and write their index."""
        self._flush()
        count = len(self._files)
        weight_map = {}
        for number, names in enumerate(self._files, 1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            final = final if count > 1 else "model.safetensors"
            (self._out / f"part-{number}").rename(self._out / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            content = {
                "metadata": {"total_size": self._total},
                "weight_map": weight_map,
            }
            text = json.dumps(content, indent=1) + "\n"
            (self._out / INDEX).write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        # Not at the top: machines that only measure may lack it, and import the models.
        from safetensors.numpy import save_file  # noqa: PLC0415

        self._files.append(list(self._held))
        path = self._out / f"part-{len(self._files)}"
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(0o644)
        self._held = {}
