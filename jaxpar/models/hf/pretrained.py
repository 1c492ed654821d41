"""How is a published model read into an engine, and an engine's written as one?"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxpar import tree
from jaxpar.models.bert.hf_families import BERTS
from jaxpar.models.decoder.hf_families import DECODERS
from jaxpar.models.hf import adapters
from jaxpar.models.hf.families import Family
from jaxpar.models.hf.leaves import Leaf
from jaxpar.models.hf.tensors import Tensors, read_config
from jaxpar.models.hf.writing import FILE_BYTES, write_folder
from jaxpar.models.lora import NO_LORA
from jaxpar.models.t5.hf_family import T5_FAMILY
from jaxpar.models.vit.hf import VITS
from jaxpar.tree import near_match
from jaxpar.types import Params

FAMILIES: dict[str, Family] = {**BERTS, **DECODERS, **VITS, "t5": T5_FAMILY}
"""By model_type, how published models are read and written."""


@runtime_checkable
class Loads(Protocol):
    """What takes parameters: a `jaxpar.Engine`."""

    @property
    def state(self) -> Any:
        """The state, whose ``weights`` are the trained and the frozen parameters."""
        ...

    def load_params(self, params: Params) -> None:
        """Replace the parameters."""
        ...


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A published model.

    Attributes:
      folder: that it is in.
      hf: its published config.
      config: ours.
      model: for ``jaxpar.initialize(model=...)``.
      loss_fn: likewise.
    """

    folder: Path
    hf: Mapping[str, Any]
    config: Any
    model: Any
    loss_fn: Callable[..., Any]

    @property
    def family(self) -> Family:
        """How models of this type are read and written."""
        return FAMILIES[self.hf["model_type"]]

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return self.family.num_params(self.config)

    def leaves(self, names: Collection[str] = ()) -> dict[str, Leaf]:
        """Path of a parameter -> what it is made of.

        Args:
          names: the tensors that there are; none for those that are written.
        """
        return self.family.leaves(self.config, self.hf, names)

    def load(self, engine: Loads) -> list[str]:
        """Give an engine the published parameters; the optimizer's state stays.

        Each process reads the slices that its devices store, a leaf at a time.

        Args:
          engine: of this model, on any mesh.

        Returns:
          Paths of the parameters that the folder lacks, of a new task's head: they
          stay as the engine drew them.

        Raises:
          ValueError: if a leaf or a tensor is missing, left over, or of another shape.
        """
        tensors, leaves, missing = self._opened()
        like = tree.merged(*engine.state.weights)
        names = tree.named_leaves(like)
        missing += [name for name in names if "/adapter/" in name]
        _check_names([*leaves, *missing], names)
        engine.load_params(_replaced(like, leaves, tensors))
        return missing

    def load_adapter(self, engine: Loads, folder: str | Path) -> None:
        """Give an engine the adapters that PEFT saved.

        Args:
          engine: of this model, whose config has the adapters
            (`from_huggingface(..., adapter=folder)`).
          folder: with adapter_config.json and adapter_model.safetensors.

        Raises:
          FileNotFoundError: if a file is missing.
          ValueError: if a tensor is missing, left over, or of another shape.
        """
        tensors = Tensors(Path(folder))
        leaves = adapters.adapter_leaves(self.leaves(), self.config.lora)
        used = {part.name for x in leaves.values() for part in x.piece.parts()}
        if strange := sorted(used ^ tensors.names):
            raise ValueError(
                f"{str(folder)!r}: {', '.join(strange[:3])} ({len(strange)} tensors) "
                "are missing, or belong to no adapter of the config."
            )
        like = tree.merged(*engine.state.weights)
        ours = {name for name in tree.named_leaves(like) if "/adapter/" in name}
        _check_names(leaves, ours)
        engine.load_params(_replaced(like, leaves, tensors))

    def save_adapter(self, engine: Loads, out: str | Path) -> None:
        """Write an engine's adapters as PEFT loads them.

        Args:
          engine: of this model, whose config has adapters.
          out: a new folder.

        Raises:
          ValueError: if `out` exists, or the model has none that PEFT knows.
        """
        named = tree.named_leaves(tree.merged(*engine.state.weights))
        base = self.leaves()
        leaves = adapters.adapter_leaves(base, self.config.lora)
        arrays = ((x, np.asarray(jax.device_get(named[x]))) for x in leaves)
        split = (own for name, x in arrays for own in leaves[name].split(x, None))
        tensors = {part.name: array for part, array in split}
        adapters.write_adapter(Path(out), tensors, self.config.lora, base)

    def check(self) -> list[str]:
        """Find what the folder lacks.

        Returns:
          Paths of the parameters of a new task's head.

        Raises:
          ValueError: if another leaf has no tensor, or a tensor no leaf.
        """
        return self._opened()[2]

    def read(self) -> dict[str, np.ndarray]:
        """All parameters of the folder by their paths, on the host, in fp32.

        Raises:
          ValueError: as `load`.
        """
        tensors, leaves, _ = self._opened()
        return {
            name: leaf.read(
                tensors,
                tuple(slice(0, n) for n in leaf.shape(tensors)),
                np.dtype(np.float32),
            )
            for name, leaf in leaves.items()
        }

    def _opened(self) -> tuple[Tensors, dict[str, Leaf], list[str]]:
        """The tensors, the leaves that they make, and those that they lack."""
        tensors, is_new = Tensors(self.folder), self._has_new_head
        leaves, family = self.leaves(tensors.names), self.family
        usable = {x for x in tensors.names if not (is_new and self._of_head(x))}
        rest = {x for x in usable if family.is_parameter(x)}
        absent: dict[str, list[str]] = {}
        for path, leaf in leaves.items():
            used = {part.name for part in leaf.piece.parts()}
            rest -= used
            if used - usable:
                absent[path] = sorted(used - usable)
        lost = [x for names in absent.values() for x in names if not self._of_head(x)]
        if lost:
            raise ValueError(
                f"the folder has no {', '.join(lost[:5])} ({len(lost)} missing), of "
                "which the model's leaves are made."
            )
        # A tied head is written by some as a tensor of its own.
        left = sorted(x for x in rest - {"lm_head.weight"} if not self._of_head(x))
        if left:
            raise ValueError(
                f"the folder's {', '.join(left[:5])} ({len(left)} left over) belong to "
                "no leaf of the model."
            )
        found = {path: leaf for path, leaf in leaves.items() if path not in absent}
        return tensors, found, sorted(absent)

    @property
    def _has_new_head(self) -> bool:
        """Whether the head is of another size than the published one."""
        fields = self.family.read_fields(self.hf)
        sizes = self.family.head_sizes
        return any(getattr(self.config, size) != fields[size] for size in sizes)

    def _of_head(self, name: str) -> bool:
        return name.startswith(self.family.heads) if self.family.heads else False

    def save(self, engine: Loads, out: str | Path, *, dtype: str = "float32") -> None:
        """Write an engine's parameters as this model is published.

        `transformers` loads the folder. Adapters are merged into the kernels.

        Args:
          engine: of this model; its frozen parameters are written too.
          out: a new folder.
          dtype: of the tensors: "float32" or "bfloat16".

        Raises:
          ValueError: if `out` exists.
        """
        params = tree.merged(*engine.state.weights)
        to_huggingface(params, self.config, self.hf, out, dtype=dtype)


def from_huggingface(
    folder: str | Path, *, adapter: str | Path | None = None, **overrides: Any
) -> Pretrained:
    """Read which model a Hugging Face folder holds.

    Args:
      folder: with config.json and .safetensors files.
      adapter: a folder of PEFT, whose adapters the model shall have;
        `Pretrained.load_adapter` reads them.
      **overrides: fields of the config to replace, such as remat or a larger
        vocab_size, whose added rows are zeros.

    Returns:
      The model; `Pretrained.load` reads its parameters into an engine.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if the architecture is not known, or needs what is not known here.

    Example:
      >>> from_huggingface("/missing")
      Traceback (most recent call last):
      FileNotFoundError: '/missing' has no config.json: give the folder of a model ...
    """
    folder = Path(folder)
    hf = read_config(folder)
    kind = hf["model_type"]
    family = _family(kind, str(folder))
    config = family.read_config(hf, **overrides)
    if adapter is not None:
        lora = adapters.read_adapter(adapter, family.leaves(config, hf, ()))
        config = dataclasses.replace(config, lora=lora)
    model, loss_fn = family.make_model(config), family.loss_fn(config)
    return Pretrained(folder, hf, config, model, loss_fn)


def to_huggingface(
    params: Params,
    config: Any,
    hf: Mapping[str, Any],
    out: str | Path,
    *,
    dtype: str = "float32",
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write parameters as a published model.

    Args:
      params: all of the model's; a leaf at a time is gathered to the host.
      config: of the model.
      hf: the published config; its vocab_size says how many rows are written.
      out: a new folder.
      dtype: of the tensors: "float32" or "bfloat16".
      file_bytes: largest size of a file; a larger tensor gets a file of its own.

    Raises:
      ValueError: if `out` exists, the parameters are not the config's, or the run has
        several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            "to_huggingface: a run of several processes saves a checkpoint, of which "
            "`jaxpar hf export` writes the model in one process."
        )
    named = tree.named_leaves(params)

    def read(name: str) -> np.ndarray:
        return np.asarray(jax.device_get(named[name]))

    lora, family = getattr(config, "lora", NO_LORA), _family(hf["model_type"], "hf")
    write_folder(
        adapters.merged(list(named), read, lora.scale),
        family.leaves(config, hf, ()),
        family.describe(config, hf),
        Path(out),
        dtype=dtype,
        file_bytes=file_bytes,
    )


def _replaced(like: Params, leaves: Mapping[str, Leaf], tensors: Tensors) -> Params:
    """Parameters, of which those that have leaves are read."""

    def read(path: Any, x: jax.Array) -> jax.Array:
        name = tree.path_name(path)
        return _read(leaves, tensors, name, x) if name in leaves else x

    return jax.tree_util.tree_map_with_path(read, like)


def _read(
    leaves: Mapping[str, Leaf], tensors: Tensors, name: str, like: jax.Array
) -> jax.Array:
    """A leaf as an array of the engine's sharding and dtype."""
    leaf = leaves[name]
    shape = leaf.shape(tensors)
    fits = len(shape) == len(like.shape) and all(
        (own == want) or (dim == leaf.padded and own < want)
        for dim, (own, want) in enumerate(zip(shape, like.shape, strict=True))
    )
    if not fits:
        raise ValueError(
            f"{leaf.name}: makes {name} of shape {shape}, but the model's is "
            f"{like.shape}. Its config and its tensors do not fit each other."
        )

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "a process is asked for what its devices store"
        pairs = zip(index, like.shape, strict=True)
        own = tuple(slice(*each.indices(size)[:2]) for each, size in pairs)
        return leaf.read(tensors, own, like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, read)


def _family(kind: str, where: str) -> Family:
    if kind not in FAMILIES:
        raise ValueError(
            f"{where}: the model type {kind!r} is not known; known are "
            f"{', '.join(FAMILIES)}.{near_match(kind, list(FAMILIES))}"
        )
    return FAMILIES[kind]


def _check_names(leaves: Collection[str], ours: Collection[str]) -> None:
    """Raise if the engine's parameters are not the config's."""
    strange = sorted(set(ours) ^ set(leaves))
    if strange:
        raise ValueError(
            f"parameters {', '.join(strange[:5])} are not those of the config; give "
            "the engine the model of from_huggingface."
        )
