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
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxpar.mesh import PIPE, TENSOR
from jaxpar.sharding.leaf_sharding import LeafSharding

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

    def flat(self, rows: jax.Array) -> jax.Array:
        """Undo `rows`."""
        return rows.T.reshape(-1)[: self.size]

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
        triples = zip(arrays, masks, worker, strict=True)
        given = [jnp.where(mask, x + error, 0.0) for x, mask, error in triples]
        sizes = [jnp.float32(math.prod(piece.leaf.shape)) for piece in self.pieces]
        scales = self._scales(given, sizes)
        new_worker = _errors(given, scales, masks)
        rows = [piece.rows(x) for piece, x in zip(self.pieces, given, strict=True)]
        swap = functools.partial(
            jax.lax.all_to_all,
            axis_name=self.axes,
            split_axis=0,
            concat_axis=0,
            tiled=True,
        )
        received = self._moved(swap, rows, [s[None] for s in scales])

        pairs = zip(self.pieces, masks, strict=True)
        own_masks = [piece.rows(mask)[own] for piece, mask in pairs]
        triples = zip(received, own_masks, server, strict=True)
        averages = [
            jnp.where(mask, x.mean(0) + error, 0.0) for x, mask, error in triples
        ]
        scales = self._scales(averages, [piece.count(own) for piece in self.pieces])
        new_server = _errors(averages, scales, own_masks)

        gather = functools.partial(jax.lax.all_gather, axis_name=self.axes, tiled=True)
        ones = [x[None] for x in averages]
        found = self._moved(gather, ones, [s[None] for s in scales])
        triples = zip(self.pieces, found, masks, strict=True)
        whole = [jnp.where(mask, piece.flat(x), 0.0) for piece, x, mask in triples]
        return whole, new_worker, new_server

    def _scales(
        self, arrays: Sequence[jax.Array], sizes: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The root mean square of each leaf, of which these are pieces."""
        squares = [
            piece.over_pieces(jnp.sum(jnp.square(x)))
            for piece, x in zip(self.pieces, arrays, strict=True)
        ]
        return [jnp.sqrt(x / size) for x, size in zip(squares, sizes, strict=True)]

    def _moved(
        self,
        move: Callable[[jax.Array], jax.Array],
        rows: Sequence[jax.Array],
        scales: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Send rows' signs with a scale each; the signs times the scales that arrive.

        Args:
          move: of uint8, ``[rows, bytes] -> [n, bytes]``.
          rows: by piece, ``[rows, chunk]``.
          scales: by piece, ``[1]``.
        """
        count = rows[0].shape[0]
        bits = [jnp.packbits(x >= 0, axis=-1, bitorder="little") for x in rows]
        numbers = jax.lax.bitcast_convert_type(jnp.concatenate(scales), jnp.uint8)
        tail = jnp.broadcast_to(numbers.reshape(1, -1), (count, numbers.size))
        moved = move(jnp.concatenate([*bits, tail], axis=1))
        begin, found = 0, []
        numbers = moved[:, -numbers.size :].reshape(len(moved), -1, SCALE_BYTES)
        arrived = jax.lax.bitcast_convert_type(numbers, jnp.float32)
        for number, piece in enumerate(self.pieces):
            own = moved[:, begin : begin + piece.num_bytes]
            unpacked = jnp.unpackbits(own, axis=-1, bitorder="little")
            signs = unpacked.astype(jnp.float32) * 2 - 1
            found.append(signs * arrived[:, number : number + 1])
            begin += piece.num_bytes
        return found


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
