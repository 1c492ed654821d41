"""What does the distance between two tokens add to their score, in T5?

Distances are in buckets: near ones in one each, farther ones in ever wider ones. A
table has a number for each bucket and head; all blocks of a stack share it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.mesh import TENSOR
from jaxpar.sharding.constrain import constrain


@dataclasses.dataclass(frozen=True)
class DistanceBuckets:
    """Which distances share a bias.

    Attributes:
      num: buckets. Half of them (of those of a direction) are of one distance each;
        the others are wider by the logarithm of the distance.
      max_distance: from it on all distances share the last bucket.
      causal: whether keys stand only before their query, which then has all buckets;
        otherwise each direction has half of them.
    """

    num: int
    max_distance: int
    causal: bool

    def of(self, distances: Int[np.ndarray, "*dims"]) -> Int[np.ndarray, "*dims"]:
        """The buckets of distances.

        Args:
          distances: place of the key minus that of the query, in tokens. The causal
            mask hides those above 0; they have the bucket of 0.

        Returns:
          Numbers of buckets, from 0.

        Example:
          >>> DistanceBuckets(8, 16, causal=True).of(np.array([0, -1, -3, -4, -9, -99]))
          array([0, 1, 3, 4, 6, 7])
        """
        if self.causal:
            return self._of_lengths(np.maximum(-distances, 0), self.num)
        half = self.num // 2
        return self._of_lengths(np.abs(distances), half) + half * (distances > 0)

    def _of_lengths(self, lengths: np.ndarray, num: int) -> np.ndarray:
        """DistanceBuckets of distances in one direction."""
        exact = num // 2
        # In fp32, as models are trained with: at the edge of a bucket fp64 may differ.
        ratio = np.maximum(lengths, exact).astype(np.float32) / np.float32(exact)
        wide = np.log(ratio) / np.float32(math.log(self.max_distance / exact))
        far = exact + (wide * np.float32(num - exact)).astype(lengths.dtype)
        return np.where(lengths < exact, lengths, np.minimum(far, num - 1))


def relative_bias(
    table_RN: Float[Array, "R N"],
    buckets: DistanceBuckets,
    num_queries: int,
    num_keys: int,
) -> Float[Array, "N T S"]:
    """Look up the bias of each query and key.

    It depends on the distance alone, T + S - 1 of them: these are looked up, by a
    matmul, and a row for each query is cut out of them. So the gradient is made of
    sums over dense arrays, without a scatter.

    Args:
      table_RN: a number for each bucket and head.
      buckets: which distances share one.
      num_queries: T.
      num_keys: S; query and key 0 stand at the same place.

    Returns:
      What is added to the scores, with heads sharded over tensor.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer" (2020), section 2.1.
    """
    distances = np.arange(1 - num_queries, num_keys)
    chosen_WR = np.eye(buckets.num, dtype=np.float32)[buckets.of(distances)]
    # The default precision rounds fp32 numbers on GPUs.
    by_distance_NW = jnp.einsum(
        "wr,rn->nw",
        chosen_WR.astype(table_RN.dtype),
        table_RN,
        precision=jax.lax.Precision.HIGHEST,
    )
    return constrain(_diagonals(by_distance_NW, num_queries), TENSOR)


def _diagonals(by_distance_NW: jax.Array, num_queries: int) -> jax.Array:
    """[N, T, S], of which [t, s] is number s - t + T - 1 of T + S - 1.

    In copies of the numbers and one zero, one after the other, a row that is one
    shorter than a copy begins one earlier in its copy than the row before.
    """
    num_heads, num = by_distance_NW.shape
    one = jnp.pad(by_distance_NW, ((0, 0), (0, 1)))
    copies = jnp.tile(one, (1, num_queries))[:, : num_queries * num]
    return copies.reshape(num_heads, num_queries, num)[:, :, num_queries - 1 :]
