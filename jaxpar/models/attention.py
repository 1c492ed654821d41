"""Attention as a module: projections, grouped queries, norms of heads, and rotation."""

import dataclasses
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.mesh import DATA, TENSOR
from jaxpar.models.attend import attend, attention_implementation
from jaxpar.models.blocked_attention import PLAIN, Scoring
from jaxpar.models.layers import Linear, multiply
from jaxpar.models.rotary import Rotation, rotate
from jaxpar.models.sparse_attention import sparse_attention
from jaxpar.sharding.constrain import constrain, rows_are_automatic
from jaxpar.sparse_attention import SparsityPattern


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of an attention.

    Attributes:
      num: query heads.
      num_kv: key and value heads; divides `num`.
      size: features of each.
      norm_all: whether a norm of queries, or of keys, is of all heads of a token
        together.
    """

    num: int
    num_kv: int
    size: int
    norm_all: bool = False


class Attention(nnx.Module):
    """Attention with grouped queries, of a row's tokens to each other or to a memory.

    Args:
      width: model width; or those of the input and of the result, where they differ.
      heads: query heads, key heads, and their size.
      biases: of which projections: of "query", "key", "value" and "output".
      output_stddev: of the output projection, which is added to the residual stream;
        the others have 0.02. Or that of each projection, by its name.
      flatten: as in `Linear`.
      implementation: "auto", "xla", "cudnn" or "blocked"; or a pattern of
        `jaxpar.sparse_attention`, to attend only to its blocks.
      pattern_len: tokens for which the pattern's block layout is made; a shorter
        sequence uses its first blocks. None for each sequence's own length.
      scoring: how queries score keys.
      make_norm: makes the norm of each query head and each key head, from its size;
        None for no norms.
      rngs: for the ``params`` stream.
    """

    def __init__(
        self,
        width: int | tuple[int, int],
        heads: Heads,
        *,
        biases: Collection[str],
        output_stddev: float | Mapping[str, float],
        flatten: bool = True,
        implementation: str | SparsityPattern = "auto",
        pattern_len: int | None = None,
        scoring: Scoring = PLAIN,
        make_norm: Callable[[int], nnx.Module] | None = None,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.head_size = heads.num, heads.size
        self.implementation = implementation
        self.pattern_len = pattern_len
        self.scoring = scoring
        given, made = (width, width) if isinstance(width, int) else width
        stddevs = output_stddev
        if not isinstance(stddevs, Mapping):
            stddevs = {"output": stddevs}

        def projection(name: str, num: int, dims: str) -> Linear:
            shape, stddev = (given, num * heads.size), stddevs.get(name, 0.02)
            how = {"bias": name in biases, "stddev": stddev, "flatten": flatten}
            return Linear(shape, ("embed", dims), **how, rngs=rngs)

        self.query = projection("query", heads.num, "heads")
        self.key = projection("key", heads.num_kv, "kv_heads")
        self.value = projection("value", heads.num_kv, "kv_heads")
        self.output = Linear(
            (heads.num * heads.size, made),
            ("heads", "embed"),
            bias="output" in biases,
            stddev=stddevs.get("output", 0.02),
            flatten=flatten,
            rngs=rngs,
        )
        self.norm_all = heads.norm_all
        sizes = (heads.num, heads.num_kv) if heads.norm_all else (1, 1)
        norms = [make_norm(n * heads.size) if make_norm else None for n in sizes]
        self.query_norm, self.key_norm = norms

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        memory_BSD: Float[Array, "B S D"] | None = None,
        rotation: Rotation | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
        memory_segment_ids_BS: Int[Array, "B S"] | None = None,
        bias_NTS: Float[Array, "N T S"] | None = None,
    ) -> Float[Array, "B T F"]:
        """Attend.

        Args:
          x_BTD: normalised residual stream.
          memory_BSD: what keys and values are made of, such as an encoder's result;
            None for `x_BTD`. Then scoring is not causal.
          rotation: rotary angles; None for none.
          segment_ids_BT: tokens attend only to tokens of their own segment; None
            where each row is one segment. Padding is a segment too.
          memory_segment_ids_BS: those of the memory's tokens; with `segment_ids_BT`.
          bias_NTS: what is added to the scores, such as that of relative positions.

        Returns:
          The update of the residual stream.

        Raises:
          ValueError: if the tensor axis does not divide the heads.
        """
        self._check_heads()
        query, key, value = self._project(x_BTD, memory_BSD)
        if self.norm_all:
            query, key = self._normed(query, key)
        query_BTNH, key_BSKH, value_BSKH = map(self._heads, (query, key, value))
        if not self.norm_all:
            query_BTNH, key_BSKH = self._normed(query_BTNH, key_BSKH)
        if rotation is not None:
            query_BTNH = rotate(query_BTNH, rotation)
            key_BSKH = rotate(key_BSKH, rotation)
        attended_BTNH = self._attend(
            checkpoint_name(query_BTNH, "qkv"),
            checkpoint_name(key_BSKH, "qkv"),
            checkpoint_name(value_BSKH, "qkv"),
            _segment_mask(segment_ids_BT, memory_segment_ids_BS),
            segment_ids_BT,
            bias_NTS,
        )
        attended_BTD = attended_BTNH.reshape(*x_BTD.shape[:2], -1)
        attended_BTD = checkpoint_name(attended_BTD, "attention")
        # The constraint is for the cotangent: under sequence parallelism the compiler
        # would leave it sharded over tokens, and compute all heads on every device.
        return self.output(constrain(attended_BTD, DATA, None, TENSOR))

    def _check_heads(self) -> None:
        """Raise where the tensor axis would cut heads: all devices would gather them.

        Key heads may be fewer than its devices.
        """
        tensor = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
        if self.num_heads % tensor:
            raise ValueError(
                f"num_heads={self.num_heads}: the mesh's tensor={tensor} must divide "
                "it, as devices compute whole heads; change the mesh or the heads."
            )

    def _normed(self, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query), self.key_norm(key)

    def _project(
        self, x_BTD: jax.Array, memory_BSD: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        """Queries, keys and values, [B, T, heads x H]: by one matmul, if that is local.

        The columns of the one kernel are in groups: a key head, its value head and the
        query heads that share them. So each device's columns are of its own heads. Not
        where the compiler places the rows: it would all-reduce the one's gradient.
        """
        parts = self.query, self.key, self.value
        if memory_BSD is not None:
            return self.query(x_BTD), self.key(memory_BSD), self.value(memory_BSD)
        size = self.head_size
        groups = self.key.kernel.shape[1] // size
        tensor = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
        if groups % tensor or rows_are_automatic():
            return tuple(part(x_BTD) for part in parts)
        width = x_BTD.shape[-1]
        kernels = [p.kernel[...].reshape(width, groups, -1, size) for p in parts]
        kernel = constrain(jnp.concatenate(kernels, axis=2), None, TENSOR)
        product = multiply(x_BTD, kernel.reshape(width, -1), flatten=self.query.flatten)
        product = product.reshape(*x_BTD.shape[:2], groups, -1, size)
        if any(part.bias is not None for part in parts):
            shapes = [kernel.shape[1:] for kernel in kernels]
            own = [
                jnp.zeros(shape, product.dtype)
                if part.bias is None
                else part.bias[...].reshape(shape)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            product = product + jnp.concatenate(own, axis=1)
        product = constrain(product, DATA, None, TENSOR)
        # Slices, not a split: the gradient of those is fused with the sum for the bias.
        ends = np.cumsum([kernel.shape[2] for kernel in kernels]).tolist()
        found = [product[..., a:b, :] for a, b in zip([0, *ends], ends, strict=False)]
        return tuple(
            part.adapted(own.reshape(*x_BTD.shape[:2], -1), x_BTD)
            for part, own in zip(parts, found, strict=True)
        )

    def _attend(
        self,
        query_BTNH: jax.Array,
        key_BSKH: jax.Array,
        value_BSKH: jax.Array,
        mask_BNTS: jax.Array | None,
        segment_ids_BT: jax.Array | None,
        bias_NTS: jax.Array | None,
    ) -> jax.Array:
        parts = query_BTNH, key_BSKH, value_BSKH
        if not isinstance(self.implementation, str):
            return sparse_attention(
                *parts,
                self.implementation,
                pattern_len=self.pattern_len,
                segment_ids_BT=segment_ids_BT,
            )
        chosen = attention_implementation(
            self.implementation,
            dtype=query_BTNH.dtype,
            head_size=self.head_size,
            masked=mask_BNTS is not None,
            biased=bias_NTS is not None,
            scoring=self.scoring,
        )
        how = {"scoring": self.scoring, "bias_NTS": bias_NTS}
        return attend(*parts, mask_BNTS, implementation=chosen, **how)

    def _heads(self, x: jax.Array) -> jax.Array:
        x_BTNH = x.reshape(*x.shape[:2], -1, self.head_size)
        return constrain(x_BTNH, DATA, None, TENSOR, None)


def _segment_mask(
    segment_ids_BT: jax.Array | None, memory_segment_ids_BS: jax.Array | None
) -> jax.Array | None:
    """Which keys are of the query's segment, [B, 1, T, S]; None for all."""
    if segment_ids_BT is None:
        return None
    keys_BS = segment_ids_BT if memory_segment_ids_BS is None else memory_segment_ids_BS
    return segment_ids_BT[:, None, :, None] == keys_BS[:, None, None]
