"""How are arrays coded in 8 or 4 bits an element, in blocks that share a scale?

A block's scale is its largest magnitude over the largest code, so that an element is
off by at most half a scale. Codes and scales of a row lie together, as bytes.
"""

import dataclasses

import jax
import jax.numpy as jnp

SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class BlockCodes:
    """Codes of few bits.

    Attributes:
      bits: of an element: 8 or 4.
      block: elements that share a scale; the last block of a row is padded.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> BlockCodes(bits=4).largest
      7
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"BlockCodes: bits={self.bits} must be 8 or 4.")
        if self.block < 8 or self.block % 2:
            raise ValueError(
                f"BlockCodes: block={self.block} must be even, and at least 8."
            )

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

    def num_bytes(self, size: int) -> int:
        """Of a row of so many elements."""
        blocks = -(-size // self.block)
        return blocks * (self.block * self.bits // 8 + SCALE_BYTES)

    def coded(self, rows: jax.Array) -> jax.Array:
        """Codes and scales of rows, ``[rows, size] -> [rows, bytes]``, uint8."""
        count, size = rows.shape
        blocks = jnp.pad(rows, ((0, 0), (0, -size % self.block)))
        blocks = blocks.reshape(count, -1, self.block).astype(jnp.float32)
        most = jnp.abs(blocks).max(axis=-1, keepdims=True)
        # What is not finite makes its scale so, and its block not a number.
        scales = jnp.where(most == 0, 1.0, most) / self.largest
        codes = jnp.round(blocks / scales).astype(jnp.int8)
        if self.bits == 4:
            positive = (codes + 8).astype(jnp.uint8)
            stored = positive[..., ::2] | (positive[..., 1::2] << 4)
        else:
            stored = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        numbers = jax.lax.bitcast_convert_type(scales[..., 0], jnp.uint8)
        return jnp.concatenate([stored, numbers], axis=-1).reshape(count, -1)

    def decoded(self, coded: jax.Array, size: int) -> jax.Array:
        """Undo `coded`, but for rounding; fp32."""
        width = self.block * self.bits // 8
        blocks = coded.reshape(len(coded), -1, width + SCALE_BYTES)
        stored, numbers = blocks[..., :width], blocks[..., width:]
        scales = jax.lax.bitcast_convert_type(numbers, jnp.float32)[..., None]
        if self.bits == 4:
            pairs = jnp.stack([stored & 15, stored >> 4], axis=-1)
            codes = pairs.reshape(*stored.shape[:-1], self.block).astype(jnp.int8) - 8
        else:
            codes = jax.lax.bitcast_convert_type(stored, jnp.int8)
        return (codes * scales).reshape(len(coded), -1)[:, :size]

    def gathered(self, shard: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
        """All-gather shards along a dim, over manual axes, in the shards' dtype."""
        moved = jnp.moveaxis(shard, dim, 0)
        arrived = jax.lax.all_gather(self.coded(moved.reshape(1, -1)), axes, tiled=True)
        rows = self.decoded(arrived, moved.size).astype(shard.dtype)
        whole = rows.reshape(-1, *moved.shape[1:])
        return jnp.moveaxis(whole, 0, dim)

    def scattered(
        self, whole: jax.Array, dim: int, axes: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Reduce-scatter along a dim, over manual axes, by one all-to-all; fp32.

        Returns:
          This shard of the sum, and what coding left out of `whole`.
        """
        ways, moved = jax.lax.axis_size(axes), jnp.moveaxis(whole, dim, 0)
        rows = moved.reshape(ways, -1).astype(jnp.float32)
        coded = self.coded(rows)
        left = rows - self.decoded(coded, rows.shape[1])
        arrived = jax.lax.all_to_all(coded, axes, 0, 0, tiled=True)
        total = self.decoded(arrived, rows.shape[1]).sum(0)
        total = total.reshape(-1, *moved.shape[1:])
        left = left.reshape(moved.shape)
        return jnp.moveaxis(total, 0, dim), jnp.moveaxis(left, 0, dim)

    def summed(
        self, shard: jax.Array, axes: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """All-reduce over manual axes: `scattered`, and its sum `gathered`; fp32.

        Returns:
          The sum, and what coding left out of `shard` at first.
        """
        size = shard.size
        flat = jnp.pad(shard.reshape(-1), (0, -size % jax.lax.axis_size(axes)))
        total, left = self.scattered(flat, 0, axes)
        whole = self.gathered(total, 0, axes)
        return whole[:size].reshape(shard.shape), left[:size].reshape(shard.shape)
