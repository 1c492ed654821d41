"""How is a published model read into an engine, and an engine's written as one?"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxpar import tree
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.decoder.hf_config import READERS, read_decoder
from jaxpar.models.decoder.hf_leaves import is_parameter, leaves_of
from jaxpar.models.decoder.loss import decoder_loss
from jaxpar.models.decoder.model import make_decoder
from jaxpar.models.hf.leaves import Leaf
from jaxpar.models.hf.tensors import CONFIG, INDEX, Tensors, read_config
from jaxpar.tree import near_match
from jaxpar.types import Params

FILE_BYTES = 4 << 30


@runtime_checkable
class Loads(Protocol):
    """What takes parameters: a `jaxpar.Engine`."""

    @property
    def state(self) -> Any:
        """The state, whose ``params`` say names, shapes and shardings."""
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
        tensors = Tensors(self.folder)
        leaves = leaves_of(self.config, self.hf["model_type"], tensors.names)
        like = engine.state.params
        _check_complete(leaves, tree.named_leaves(like), tensors)
        found = jax.tree_util.tree_map_with_path(
            lambda path, x: _read(leaves, tensors, tree.path_name(path), x), like
        )
        engine.load_params(found)

    def save(self, params: Params, out: Path, *, dtype: str = "float32") -> None:
        """Write parameters as this model is published, for `transformers` to load.

        Args:
          params: as ``engine.state.params``.
          out: a new folder.
          dtype: of the tensors: "float32" or "bfloat16".
        """
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
            f"{str(folder)!r}: model_type={kind!r} is not known; known are "
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
      params: as ``engine.state.params``; a leaf at a time is gathered to the host.
      config: of the model.
      hf: the published config; its vocab_size says how many rows are written.
      out: a new folder.
      dtype: of the tensors: "float32" or "bfloat16".
      file_bytes: largest size of a file; a larger tensor gets a file of its own.

    Raises:
      ValueError: if `out` exists.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"out={str(out)!r} exists already; name a new folder.")
    out.mkdir(parents=True)
    leaves = leaves_of(config, hf["model_type"])
    writer = _Writer(out, file_bytes)
    joined: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tree.named_leaves(params).items():
        whole = np.asarray(jax.device_get(value)).astype(jnp.dtype(dtype))
        for piece, part in leaves[name].split(whole, hf["vocab_size"]):
            number, of = piece.part
            parts = joined.setdefault(piece.name, {})
            parts[number] = part
            if len(parts) == of:
                own = [each for _, each in sorted(joined.pop(piece.name).items())]
                writer.add(piece.name, np.concatenate(own, -1) if of > 1 else own[0])
    writer.close()
    published = {**hf, "torch_dtype": dtype, "dtype": dtype}
    (out / CONFIG).write_text(json.dumps(published, indent=2) + "\n", encoding="utf-8")


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
        self._files.append(list(self._held))
        path = self._out / f"part-{len(self._files)}"
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(0o644)
        self._held = {}


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

    def read(index: tuple[slice, ...]) -> np.ndarray:
        bounds = [
            each.indices(size) for each, size in zip(index, like.shape, strict=True)
        ]
        own = tuple(slice(start, stop) for start, stop, _ in bounds)
        return leaf.read(tensors, own).astype(like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, read)


def _check_complete(
    leaves: Mapping[str, Leaf], ours: Collection[str], tensors: Tensors
) -> None:
    """Raise if a leaf has no tensor, or a tensor no leaf."""
    strange = sorted(set(ours) ^ set(leaves))
    if strange:
        raise ValueError(
            f"parameters {', '.join(strange[:5])} are not those of the config; give "
            "the engine the model of from_huggingface."
        )
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
