"""How are timm's CoAtNets read and written: which tensors is a leaf made of?

A name of ours has a name of theirs by the table of modules; a leaf of a section is the
stack of its blocks' tensors. Theirs have kernels [out, in, height, width], and queries,
keys and values in one, by heads.
"""

import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxpar.models.coatnet.config import NUM_LEVELS, CoatnetConfig
from jaxpar.models.coatnet.model import make_coatnet
from jaxpar.tree import named_leaves
from jaxpar.types import Params, PyTree

_MODULES = {
    "norm": "pre_norm",
    "widen": "conv1_1x1",
    "widen_norm": "norm1",
    "conv": "conv2_kxk",
    "conv_norm": "norm2",
    "weigh/squeeze": "se.fc1",
    "weigh/excite": "se.fc2",
    "narrow": "conv3_1x1",
    "shortcut": "shortcut.expand",
    "attention_norm": "norm1",
    "attention/query": "attn.qkv",
    "attention/key": "attn.qkv",
    "attention/value": "attn.qkv",
    "attention/output": "attn.proj",
    "relative": "attn.rel_pos",
    "mlp_norm": "norm2",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}
_OF_ENDS = {
    "embed/conv_1": "stem.conv1",
    "embed/norm": "stem.norm1",
    "embed/conv_2": "stem.conv2",
    "head/norm": "head.norm",
    "head/hidden": "head.pre_logits.fc",
    "head/logits": "head.fc",
}
_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "table": "relative_position_bias_table",
    "mean": "running_mean",
    "variance": "running_var",
}
_JOINED = ("query", "key", "value")
_COUNT = "num_batches_tracked"


def read_timm(
    config: CoatnetConfig, tensors: Mapping[str, np.ndarray]
) -> tuple[Params, PyTree]:
    """Read the tensors of timm's ``coatnet_N_224``.

    Without ``key_bias`` the biases of keys are left out: logits are the same.

    Args:
      config: of the model; with ``norm="batch"``.
      tensors: its ``state_dict()``, as arrays.

    Returns:
      The parameters, as ``engine.load_params`` takes them; and the running statistics.

    Raises:
      ValueError: if the config has other norms, or tensors are missing, unknown or of
        another shape.
    """
    shapes = _shapes(config)
    asked = {name for path in shapes for name, _ in _sources(config, path)}
    given = {name for name in tensors if not name.endswith(_COUNT)}
    if asked != given:
        missing, unknown = sorted(asked - given), sorted(given - asked)
        raise ValueError(
            f"tensors: {len(missing)} are missing ({', '.join(missing[:3])}) and "
            f"{len(unknown)} are unknown ({', '.join(unknown[:3])}); give the "
            "state_dict() of timm's coatnet with the depths of the config."
        )
    leaves = {}
    for path, shape in shapes.items():
        read = functools.partial(_read, config, path)
        parts = [read(np.asarray(tensors[name])) for name, _ in _sources(config, path)]
        leaf = np.stack(parts) if _is_stack(path) else parts[0]
        if leaf.shape != shape:
            raise ValueError(
                f"tensors: {path} is made of an array of shape {leaf.shape}, but has "
                f"{shape}; give the config the widths of the tensors."
            )
        leaves[tuple(path.split("/"))] = leaf.astype(np.float32)
    kept = {path: x for path, x in leaves.items() if path[-1] in ("mean", "variance")}
    params = {path: x for path, x in leaves.items() if path not in kept}
    return traverse_util.unflatten_dict(params), traverse_util.unflatten_dict(kept)


def write_timm(
    config: CoatnetConfig, params: Params, state: PyTree
) -> dict[str, np.ndarray]:
    """Make the tensors of timm's ``coatnet_N_224``.

    Args:
      config: of the model; with ``norm="batch"``.
      params: as ``engine.state.params``.
      state: the running statistics, as ``engine.state.model_state``.

    Returns:
      The tensors by name, for ``load_state_dict`` after ``torch.from_numpy``.

    Raises:
      ValueError: if the config has other norms.
    """
    leaves = named_leaves(params) | named_leaves(state)
    found: dict[str, np.ndarray] = {}
    joined: dict[str, dict[str, np.ndarray]] = {}
    for path in _shapes(config):
        for name, index in _sources(config, path):
            leaf = np.asarray(leaves[path])
            tensor = _write(path, leaf if index is None else leaf[index])
            if path.split("/")[-2] in _JOINED:
                joined.setdefault(name, {})[path.split("/")[-2]] = tensor
            else:
                found[name] = tensor
    for name, parts in joined.items():
        split = [parts.get(part, np.zeros_like(parts["query"])) for part in _JOINED]
        by_head = [
            part.reshape(-1, config.head_size, *part.shape[1:]) for part in split
        ]
        whole = np.concatenate(by_head, axis=1)
        found[name] = whole.reshape(-1, *whole.shape[2:])
    counts = [name for name in found if name.endswith("running_mean")]
    number = np.zeros((), np.int64)
    return found | {name.replace("running_mean", _COUNT): number for name in counts}


def _shapes(config: CoatnetConfig) -> dict[str, tuple[int, ...]]:
    """Path of a leaf -> its shape."""
    if config.norm != "batch":
        raise ValueError(
            f"config: norm={config.norm!r}, but timm's CoAtNets have running "
            "statistics; give one with norm='batch'."
        )
    side = config.image_size
    image = jax.ShapeDtypeStruct((1, side, side, config.channels), jnp.float32)
    model = jax.eval_shape(lambda: make_coatnet(config).init(0, image))
    leaves = named_leaves(model.params) | named_leaves(model.state)
    return {path: leaf.shape for path, leaf in leaves.items()}


def _is_stack(path: str) -> bool:
    return path.split("/")[0] in {f"s{level + 1}" for level in range(NUM_LEVELS)}


def _sources(config: CoatnetConfig, path: str) -> Iterator[tuple[str, int | None]]:
    """A leaf's tensors, each with its index in the stack."""
    module, _, leaf = path.rpartition("/")
    if module in _OF_ENDS:
        yield f"{_OF_ENDS[module]}.{_LEAVES[leaf]}", None
        return
    part, _, below = module.removeprefix("embed/").partition("/")
    level, is_first = int(part[1]) - 1, part.endswith("_first")
    theirs = _MODULES[below]
    if is_first and below == "attention_norm":
        theirs += ".norm"
    for block in range(1, config.depths[level]) if not is_first else (0,):
        name = f"stages.{level}.blocks.{block}.{theirs}.{_LEAVES[leaf]}"
        yield name, None if is_first else block - 1


def _read(config: CoatnetConfig, path: str, tensor: np.ndarray) -> np.ndarray:
    """A block's leaf, of its tensor."""
    *_, module, leaf = path.split("/")
    if module in _JOINED:
        by_head = tensor.reshape(-1, 3, config.head_size, *tensor.shape[1:])
        tensor = by_head[:, _JOINED.index(module)].reshape(-1, *tensor.shape[1:])
    return tensor if leaf != "kernel" else _layout(path)[0](tensor)


def _write(path: str, leaf: np.ndarray) -> np.ndarray:
    """A tensor, of a block's leaf."""
    return leaf if not path.endswith("/kernel") else _layout(path)[1](leaf)


def _layout(path: str) -> tuple[Callable[[np.ndarray], np.ndarray], ...]:
    """Between kernels of theirs and of ours: of convolutions, the head, and matmuls."""
    if path.split("/")[-2].startswith("conv"):
        return lambda t: t.transpose(2, 3, 1, 0), lambda k: k.transpose(3, 2, 0, 1)
    if path.startswith("head/"):
        return np.transpose, np.transpose
    return lambda t: t[..., 0, 0].T, lambda k: k.T[..., None, None]
