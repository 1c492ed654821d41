"""How are parameters exported for other programs and imported: as safetensors.

One file at a time is held in memory, so a machine smaller than the model can export it.
Names are those of the leaves, joined by dots. Several files have an index next to them,
in the form that Hugging Face's libraries read.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.checkpoint.manifest import DamagedError
from jaxpar.checkpoint.places import place_of
from jaxpar.checkpoint.store import Checkpoints
from jaxpar.tree import matches

PARAMS, FROZEN = "params/", "frozen/"
DTYPES = ("fp32", "bf16")
ADAPTERS = "adapters"
"""Stands for the parameters that a run with frozen ones trained."""
FILE_BYTES = 4 << 30
"""Default size of one file, at most."""

_INDEX = "model.safetensors.index.json"


def export(
    folder: Path | str,
    out: Path,
    *,
    step: int | None = None,
    dtype: str = "fp32",
    only: Sequence[str] | str = (PARAMS + "*", FROZEN + "*"),
    file_bytes: int = FILE_BYTES,
) -> list[Path]:
    """Write a checkpoint's parameters as safetensors.

    Args:
      folder: the checkpoints; also of a bucket, by its URL.
      out: a new folder for the files.
      step: the step; None for the newest valid one.
      dtype: of floating leaves: "fp32" or "bf16" (rounded to nearest).
      only: patterns of the leaves to write; or "adapters" for the parameters that the
        run trained, of a run with frozen ones.
      file_bytes: largest size of a file; a larger leaf gets a file of its own.

    Returns:
      The files.

    Raises:
      ValueError: if `out` exists already, or a pattern matches no leaf.
      DamagedError: if the step is damaged.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}.")
    if file_bytes < 1:
        raise ValueError(f"file_bytes={file_bytes} must be at least 1.")
    if out.exists():
        raise ValueError(f"out={str(out)!r} exists already; name a new folder.")
    place = place_of(folder)
    number = place.choose(step, {})["step"]
    stored = place.step(number)
    manifest = stored.manifest()
    stored.require_declared(manifest)
    chosen = _chosen(manifest.leaves, only, str(stored))
    groups = list(_groups(chosen, dtype, file_bytes))
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    names = _file_names(len(groups))
    for name, group in zip(names, groups, strict=True):
        held = {
            _outer(leaf): _cast(stored.read_whole(leaf, manifest), dtype)
            for leaf in group
        }
        save_file(held, part / name, metadata={"format": "pt", "step": str(number)})
        (part / name).chmod(0o644)  # Only its owner could read it.
    if len(groups) > 1:
        _write_index(part / _INDEX, dict(zip(names, groups, strict=True)), dtype)
    part.rename(out)
    return [out / name for name in names]


def import_safetensors(paths: Sequence[Path], folder: Path | str) -> list[str]:
    """Make a checkpoint, step 0, from safetensors: only parameters, in fp32.

    An engine loads them with ``engine.restore(folder, only=["params/*"])``.

    Args:
      paths: the files; a folder stands for the safetensors in it.
      folder: of the new checkpoint.

    Returns:
      The leaves' names.

    Raises:
      ValueError: if a file is not in the safetensors format, a name occurs twice, or
        there are no files.
    """
    found = [each for path in paths for each in _files_of(path)]
    if not found:
        raise ValueError(f"{[str(path) for path in paths]}: has no safetensors files.")
    leaves: dict[str, Any] = {}
    for path in found:
        for name, array in _read(path):
            if name in leaves:
                raise ValueError(f"{str(path)!r}: {name!r} is in another file too.")
            floating = jnp.issubdtype(array.dtype, jnp.floating)
            leaves[name] = jnp.asarray(array, jnp.float32 if floating else None)
    checkpoints = Checkpoints(folder)
    checkpoints.save(
        0, under_params(leaves), meta={"imported": [p.name for p in found]}
    )
    checkpoints.close()
    return [PARAMS + name.replace(".", "/") for name in leaves]


def _chosen(
    leaves: Mapping[str, LeafSpec], only: Sequence[str] | str, where: str
) -> dict[str, LeafSpec]:
    """The leaves to write."""
    if only == ADAPTERS:
        if not any(name.startswith(FROZEN) for name in leaves):
            raise ValueError(
                f"only={only!r}: {where!r} has no frozen parameters, so it has "
                "no adapters; leave only out to write all parameters."
            )
        only = (PARAMS + "*",)
    patterns = (only,) if isinstance(only, str) else only
    chosen = {
        name: spec
        for name, spec in leaves.items()
        if any(matches(pattern, name) for pattern in patterns)
    }
    if not chosen:
        raise ValueError(f"only={list(patterns)} matches no leaf of {where!r}.")
    return chosen


def _groups(
    leaves: Mapping[str, LeafSpec], dtype: str, most: int
) -> Iterator[list[str]]:
    """The leaves of each file, in order."""
    group: list[str] = []
    size = 0
    for name, spec in leaves.items():
        own = _bytes_of(spec, dtype)
        if group and size + own > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += own
    yield group


def _bytes_of(spec: LeafSpec, dtype: str) -> int:
    is_halved = dtype == "bf16" and spec.dtype == "float32"
    return spec.num_bytes // 2 if is_halved else spec.num_bytes


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.bfloat16 if dtype == "bf16" else np.float32)


def _outer(leaf: str) -> str:
    """The name of a leaf in the file."""
    name = leaf.removeprefix(PARAMS).removeprefix(FROZEN)
    if "." in name:
        raise ValueError(
            f"leaf {leaf!r} has a dot in its name, but dots join safetensors' names; "
            "exclude it with only=."
        )
    return name.replace("/", ".")


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write_index(path: Path, groups: Mapping[str, Sequence[str]], dtype: str) -> None:
    weight_map = {
        _outer(leaf): file for file, group in groups.items() for leaf in group
    }
    sizes = [each.stat().st_size for each in path.parent.glob("*.safetensors")]
    content = {
        "metadata": {"total_size": sum(sizes), "dtype": dtype},
        "weight_map": weight_map,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file or a folder.")
    return [path]


def _read(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of a file; the library checks declared sizes."""
    try:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - file is not a dict
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise DamagedError(f"{str(path)!r} is not safetensors ({error})") from error


def under_params(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by dotted names as a tree under "params"."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *above, last = name.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"{name!r} is nested below another tensor's name.")
        if last in place or not all((*above, last)):
            raise ValueError(f"{name!r} can't be a leaf's name.")
        place[last] = leaf
    return {"params": tree}
