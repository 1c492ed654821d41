"""How do data shards average arrays in one bit an element, with error feedback?

Every shard is a worker, and the server of a chunk of each leaf. A worker sends the
signs of its array and a scale; what these leave out it adds to its next one. A server
averages what it got of its chunk and sends signs and a scale of that, likewise. All
leaves travel together, scales beside the bits: one all-to-all, then one all-gather.

Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with
Adam's Convergence Speed", section 4.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxpar.mesh import PIPE, TENSOR
from jaxpar.sharding.leaf_sharding import LeafSharding
from kernels_pallas.sign_bits import COLUMNS, pack, pack_mean, unpack

SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class SignPiece:
    """A tensor and pipe shard of a leaf, as its signs are sent.

    Element i of it, in the order of its dims, is in chunk i mod n: the same elements
    are together whichever axes split the leaf, if n divides what they leave.

    Attributes:
      leaf: the leaf.
      workers: the data shards, n.
    """

    leaf: LeafSharding
    workers: int

    @property
    def size(self) -> int:
        """Elements of the piece."""
        return math.prod(self.leaf.shape) // self.leaf.ways_placed

    @property
    def chunk(self) -> int:
        """Elements of a chunk of the piece: a multiple of 8."""
        return -(-self.size // (8 * self.workers)) * 8

    @property
    def num_bytes(self) -> int:
        """Of a chunk's signs."""
        return self.chunk // 8

    def rows(self, flat: jax.Array) -> jax.Array:
        """The chunks, ``[n, chunk]``, of an array of the piece; zeros at the end."""
        padded = jnp.pad(flat, (0, self.chunk * self.workers - self.size))
        return padded.reshape(self.chunk, self.workers).T

    @property
    def columns(self) -> int:
        """Of the rows whose signs are packed: a multiple of the workers.

        A byte's elements are then in one chunk, and bytes in chunks as elements are.
        """
        fits = self.size % (8 * COLUMNS) == 0 and COLUMNS % self.workers == 0
        return COLUMNS if fits else self.workers

    @property
    def own_columns(self) -> int:
        """Likewise, of a chunk's rows."""
        return self.columns // self.workers

    def whole(self, bits: jax.Array, scales: jax.Array) -> jax.Array:
        """The piece's elements, of all chunks' signs and scales.

        Args:
          bits: ``[n, bytes]``.
          scales: ``[n]``.
        """
        of_columns = jnp.tile(scales, self.own_columns)
        flat = bits.T.reshape(-1)
        return unpack(flat, of_columns, columns=self.columns)[: self.size]

    def count(self, worker: jax.Array) -> jax.Array:
        """Elements of a worker's chunk of the whole leaf; at least one."""
        own = (self.size - worker + self.workers - 1) // self.workers
        return jnp.maximum(self.over_pieces(own.astype(jnp.float32)), 1.0)

    def over_pieces(self, value: jax.Array) -> jax.Array:
        """The sum over a leaf's pieces of what was computed of each."""
        split = [axis for axes in self.leaf.placed for axis in axes]
        copies = [axis for axis in (PIPE, TENSOR) if axis not in split]
        # Of several copies of a piece, the first counts.
        first = sum((jax.lax.axis_index(axis) for axis in copies), jnp.int32(0)) == 0
        return jax.lax.psum(jnp.where(first, value, 0.0), (PIPE, TENSOR))


@dataclasses.dataclass(frozen=True)
class SignExchange:
    """The exchange of all leaves' pieces; runs where all mesh axes are manual.

    Attributes:
      pieces: the leaves'.
      axes: the batch axes.
    """

    pieces: Sequence[SignPiece]
    axes: tuple[str, ...]

    def __call__(
        self,
        arrays: Sequence[jax.Array],
        masks: Sequence[jax.Array],
        worker: Sequence[jax.Array],
        server: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Average arrays over the workers, nearly.

        Args:
          arrays: by piece, this worker's array, flat.
          masks: by piece, which elements are averaged, the same on every worker; others
            are zero: one bit has no zero.
          worker: by piece, its error of before, flat.
          server: by piece, the error of its chunk of before.

        Returns:
          The averages, the same on every worker, and both new errors.
        """
        own = jax.lax.axis_index(self.axes)
        # Made once, as bytes: a kernel reads no bool.
        masks = jax.lax.optimization_barrier([x.astype(jnp.uint8) for x in masks])
        quads = zip(self.pieces, arrays, worker, masks, strict=True)
        packed = [pack(*given, columns=piece.columns) for piece, *given in quads]
        given = [found.given for found in packed]
        sizes = [jnp.float32(math.prod(piece.leaf.shape)) for piece in self.pieces]
        scales = self._scales([found.squares for found in packed], sizes)
        new_worker = _errors(given, scales, masks)
        pairs = zip(self.pieces, packed, strict=True)
        bits = [found.bits.reshape(-1, piece.workers).T for piece, found in pairs]
        swap = functools.partial(
            jax.lax.all_to_all,
            axis_name=self.axes,
            split_axis=0,
            concat_axis=0,
            tiled=True,
        )
        received = self._moved(swap, bits, [s[None] for s in scales])

        pairs = zip(self.pieces, masks, strict=True)
        own_masks = [piece.rows(mask)[own] for piece, mask in pairs]
        quads = zip(self.pieces, received, server, own_masks, strict=True)
        packed = [
            pack_mean(*arrived, *others, columns=piece.own_columns)
            for piece, arrived, *others in quads
        ]
        averages = [found.given for found in packed]
        counts = [piece.count(own) for piece in self.pieces]
        scales = self._scales([found.squares for found in packed], counts)
        new_server = _errors(averages, scales, own_masks)

        gather = functools.partial(jax.lax.all_gather, axis_name=self.axes, tiled=True)
        bits = [found.bits[None] for found in packed]
        found = self._moved(gather, bits, [s[None] for s in scales])
        triples = zip(self.pieces, found, masks, strict=True)
        whole = [jnp.where(mask, piece.whole(*x), 0.0) for piece, x, mask in triples]
        return whole, new_worker, new_server

    def _scales(
        self, squares: Sequence[jax.Array], sizes: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The root mean square of each leaf, of whose pieces these are the squares."""
        triples = zip(self.pieces, squares, sizes, strict=True)
        return [jnp.sqrt(piece.over_pieces(x) / size) for piece, x, size in triples]

    def _moved(
        self,
        move: Callable[[jax.Array], jax.Array],
        bits: Sequence[jax.Array],
        scales: Sequence[jax.Array],
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Send signs with a scale each; those that arrive, each with its scale.

        Args:
          move: of uint8, ``[rows, bytes] -> [n, bytes]``.
          bits: by piece, ``[rows, bytes]``.
          scales: by piece, ``[1]``.

        Returns:
          By piece, ``[n, bytes]`` and ``[n]``.
        """
        count = bits[0].shape[0]
        numbers = jax.lax.bitcast_convert_type(jnp.concatenate(scales), jnp.uint8)
        tail = jnp.broadcast_to(numbers.reshape(1, -1), (count, numbers.size))
        moved = move(jnp.concatenate([*bits, tail], axis=1))
        numbers = moved[:, -numbers.size :].reshape(len(moved), -1, SCALE_BYTES)
        arrived = jax.lax.bitcast_convert_type(numbers, jnp.float32)
        ends = itertools.accumulate(piece.num_bytes for piece in self.pieces)
        return [
            (moved[:, end - piece.num_bytes : end], arrived[:, number])
            for number, (piece, end) in enumerate(zip(self.pieces, ends, strict=True))
        ]


def _errors(
    arrays: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    masks: Sequence[jax.Array],
) -> list[jax.Array]:
    """What signs and scales leave out."""
    return [
        jnp.where(mask, x - scale * sign(x), 0.0)
        for x, scale, mask in zip(arrays, scales, masks, strict=True)
    ]


def sign(x: jax.Array) -> jax.Array:
    """1 where an element is at least 0, -1 elsewhere."""
    return jnp.where(x >= 0, 1.0, -1.0)
