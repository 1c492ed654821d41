"""Low-rank adapters: a few parameters beside frozen kernels tune a matmul."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.models.layers import Linear, Names, multiply
from jaxpar.tree import near_match

TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
"""The matmuls of a block, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters of a model.

    Attributes:
      rank: features between the two factors of an adapter; 0 for no adapters.
      alpha: an adapter's update is multiplied by alpha / rank.
      targets: the matmuls that have one, of `TARGETS`; those that a block lacks are
        passed over.
      rank_stabilised: whether it is alpha / sqrt(rank) instead.

    Raises:
      ValueError: if a number is out of range, or a target is not known.

    Example:
      >>> LoraConfig(rank=8, alpha=16.0).scale
      2.0
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("query", "value")
    rank_stabilised: bool = False

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"LoraConfig: rank={self.rank} must be at least 0.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"LoraConfig: alpha={self.alpha} must be above 0.")
        for name in self.targets:
            if name not in TARGETS:
                raise ValueError(
                    f"LoraConfig: targets={name!r} must be of "
                    f"{', '.join(TARGETS)}.{near_match(name, TARGETS)}"
                )
        if self.rank and not self.targets:
            raise ValueError(
                f"LoraConfig: targets=() with rank={self.rank} adapts nothing; name "
                f"some of {', '.join(TARGETS)}."
            )

    @property
    def scale(self) -> float:
        """The factor of an adapter's update."""
        rank = max(1, self.rank)
        return self.alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


NO_LORA = LoraConfig()
"""Of a model without adapters."""


class LowRank(nnx.Module):
    """The product with two thin kernels, whose update is zero when it is made.

    Its parameters are of the type `nnx.LoRAParam`, so that
    ``jaxpar.initialize(trainable=nnx.LoRAParam)`` trains them alone.

    Args:
      shape: features in and out.
      names: logical names of the two dims.
      config: rank and scale.
      rngs: for the ``params`` stream.

    Source: Hu et al., "LoRA" (2021); Kalajdzievski, "rsLoRA" (2023), for the scale by
    the root of the rank.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        names: Names,
        config: LoraConfig,
        *,
        rngs: nnx.Rngs,
    ):
        bound = shape[0] ** -0.5
        drawn = jax.random.uniform(
            rngs.params(), (shape[0], config.rank), minval=-bound, maxval=bound
        )
        self.a = _lora_param(drawn, (names[0], None))
        self.b = _lora_param(jnp.zeros((config.rank, shape[1])), (None, names[1]))
        self.scale = config.scale

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims F"]:
        """The update of a matmul's result.

        Args:
          x: [..., in], the matmul's input.

        Returns:
          [..., out].
        """
        inner = multiply(x, self.a[...], flatten=False)
        return multiply(inner, self.b[...] * self.scale, flatten=False)


def add_adapters(module: nnx.Module, config: LoraConfig, rngs: nnx.Rngs) -> None:
    """Give the matmuls of a block that a config names their adapters.

    Args:
      module: the block; changed.
      config: the adapters.
      rngs: for the ``params`` stream.
    """
    if not config.rank:
        return
    found = sorted(
        ("/".join(map(str, path)), own)
        for path, own in nnx.iter_modules(module)
        if isinstance(own, Linear) and path and path[-1] in config.targets
    )
    for _, linear in found:
        names = linear.kernel.get_metadata("out_sharding")
        inputs, outputs = linear.kernel.shape
        linear.adapter = LowRank((inputs, outputs), names, config, rngs=rngs)


def num_adapter_params(config: LoraConfig, shapes: Sequence[tuple[int, int]]) -> int:
    """Count the parameters of adapters of matmuls of such shapes, in and out."""
    return config.rank * sum(map(sum, shapes))


def _lora_param(value: jax.Array, names: Names) -> nnx.LoRAParam:
    return nnx.LoRAParam(value, out_sharding=names, eager_sharding=False)
