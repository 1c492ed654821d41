"""Which parameters does weight decay usually apply to?"""

from typing import Any

import jax

from jaxpar.tree import path_name
from jaxpar.types import PyTree

_KEPT = ("bias", "scale")
_NORMS = ("norm", "ln_")


def decayed(params: PyTree) -> PyTree:
    """Say which leaves decay: matrices and tables, not biases and norms.

    Leaves named "bias" or "scale" and those of modules with "norm" in their name or
    "ln_" at its start are left out. Their number of dims says nothing: in a stack of
    blocks a norm's scale has two.

    Args:
      params: tree of the parameters, as ``engine.state.params``.

    Returns:
      The same tree of True and False, as ``mask=`` of `optax.adamw` and
      `jaxpar.optim.fused_adamw` takes it; or this function itself is the mask.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = {"kernel": jnp.ones((3, 8, 8)), "bias": jnp.ones((3, 8))}
      >>> decayed({"up": layer, "norm": {"scale": jnp.ones((3, 8))}})
      {'norm': {'scale': False}, 'up': {'bias': False, 'kernel': True}}

    Source: Radford et al., "Improving Language Understanding by Generative
    Pre-Training" (2018), section 4.1, which leaves out biases and gains.
    """

    def is_decayed(path: tuple, leaf: Any) -> bool:
        *modules, own = path_name(path).lower().split("/")
        is_norm = any(_NORMS[0] in m or m.startswith(_NORMS[1]) for m in modules)
        return not (is_norm or own.endswith(_KEPT))

    return jax.tree_util.tree_map_with_path(is_decayed, params)
