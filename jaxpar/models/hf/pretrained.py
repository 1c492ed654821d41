"""How is a published model read into an engine, and an engine's written as one?"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxpar import tree
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.decoder.hf_config import READERS, read_decoder
from jaxpar.models.decoder.hf_leaves import is_parameter, leaves_of
from jaxpar.models.decoder.loss import decoder_loss
from jaxpar.models.decoder.model import make_decoder
from jaxpar.models.hf.leaves import Leaf
from jaxpar.models.hf.tensors import Tensors, read_config
from jaxpar.models.hf.writing import FILE_BYTES, write_folder
from jaxpar.tree import near_match
from jaxpar.types import Params


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
    config: DecoderConfig
    model: Any
    loss_fn: Callable[..., Any]

    def load(self, engine: Loads) -> None:
        """Give an engine the published parameters; the optimizer's state stays.

        Each process reads the slices that its devices store, a leaf at a time.

        Args:
          engine: of this model, on any mesh.

        Raises:
          ValueError: if a leaf or a tensor is missing, left over, or of another shape.
        """
        tensors, leaves = self._opened()
        like = tree.merged(*engine.state.weights)
        _check_names(leaves, tree.named_leaves(like))
        found = jax.tree_util.tree_map_with_path(
            lambda path, x: _read(leaves, tensors, tree.path_name(path), x), like
        )
        engine.load_params(found)

    def check(self) -> None:
        """Raise a ValueError if a leaf has no tensor, or a tensor no leaf."""
        self._opened()

    def read(self) -> dict[str, np.ndarray]:
        """All parameters by their paths, on the host, in fp32.

        Raises:
          ValueError: as `load`.
        """
        tensors, leaves = self._opened()
        return {
            name: leaf.read(
                tensors, tuple(slice(0, n) for n in leaf.shape(tensors))
            ).astype(np.float32)
            for name, leaf in leaves.items()
        }

    def _opened(self) -> tuple[Tensors, dict[str, Leaf]]:
        tensors = Tensors(self.folder)
        leaves = leaves_of(self.config, self.hf["model_type"], tensors.names)
        _check_tensors(leaves, tensors)
        return tensors, leaves

    def save(self, engine: Loads, out: str | Path, *, dtype: str = "float32") -> None:
        """Write an engine's parameters as this model is published.

        `transformers` loads the folder.

        Args:
          engine: of this model; its frozen parameters are written too.
          out: a new folder.
          dtype: of the tensors: "float32" or "bfloat16".

        Raises:
          ValueError: if `out` exists.
        """
        params = tree.merged(*engine.state.weights)
        to_huggingface(params, self.config, self.hf, out, dtype=dtype)


def from_huggingface(folder: str | Path, **overrides: Any) -> Pretrained:
    """Read which model a Hugging Face folder holds.

    Args:
      folder: with config.json and .safetensors files.
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
    if kind not in READERS:
        raise ValueError(
            f"{str(folder)!r}: the model type {kind!r} is not known; known are "
            f"{', '.join(READERS)}.{near_match(kind, list(READERS))}"
        )
    config = read_decoder(hf, **overrides)
    return Pretrained(folder, hf, config, make_decoder(config), decoder_loss)


def to_huggingface(
    params: Params,
    config: DecoderConfig,
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
    named = tree.named_leaves(params).items()
    write_folder(
        ((name, np.asarray(jax.device_get(value))) for name, value in named),
        leaves_of(config, hf["model_type"]),
        hf,
        Path(out),
        dtype=dtype,
        file_bytes=file_bytes,
    )


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
            f"{leaf.pieces[0].name}: makes {name} of shape {shape}, but the model's is "
            f"{like.shape}. Its config and its tensors do not fit each other."
        )

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "a process is asked for what its devices store"
        pairs = zip(index, like.shape, strict=True)
        own = tuple(slice(*each.indices(size)[:2]) for each, size in pairs)
        return leaf.read(tensors, own).astype(like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, read)


def _check_names(leaves: Mapping[str, Leaf], ours: Collection[str]) -> None:
    """Raise if the engine's parameters are not the config's."""
    strange = sorted(set(ours) ^ set(leaves))
    if strange:
        raise ValueError(
            f"parameters {', '.join(strange[:5])} are not those of the config; give "
            "the engine the model of from_huggingface."
        )


def _check_tensors(leaves: Mapping[str, Leaf], tensors: Tensors) -> None:
    """Raise if a leaf has no tensor, or a tensor no leaf."""
    used = {piece.name for leaf in leaves.values() for piece in leaf.pieces}
    missing = sorted(used - tensors.names)
    if missing:
        raise ValueError(
            f"the folder has no {', '.join(missing[:5])} ({len(missing)} missing), of "
            "which the model's leaves are made."
        )
    rest = sorted(name for name in tensors.names - used if is_parameter(name))
    is_tied_head = rest == ["lm_head.weight"]
    if rest and not is_tied_head:
        raise ValueError(
            f"the folder's {', '.join(rest[:5])} ({len(rest)} left over) belong to no "
            "leaf of the model."
        )
