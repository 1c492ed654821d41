"""How is a block layout mapped to tiles: the work of each program of the kernels."""

import dataclasses
import functools
import math
import warnings

import numpy as np

from kernels_pallas.backend import has_kernels
from kernels_pallas.block_sparse_attention.layout import BlockLayout
from kernels_pallas.block_sparse_attention.lists import Lists, make_lists

COARSE = 2.0
"""Work on tiles over work on blocks above which a warning is given."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tokens per step of a kernel, along each side of the matrix.

    Attributes:
      q: queries.
      k: keys.
    """

    q: int = 128
    k: int = 128


@dataclasses.dataclass(frozen=True, eq=False)
class TileWork:
    """The work of block-sparse attention, fixed before anything is compiled.

    They are compared by identity, so that one can be a static argument of a jitted
    function.

    Attributes:
      rows: for each tile of queries its tiles of keys, for the forward pass and dq.
      columns: for each tile of keys its tiles of queries, for dk and dv.
      masks: [M, tile.q / b, tile.k / b] booleans, the blocks of a tile that are active,
        with b the smaller of tile and block; the first has all blocks active.
      seq_q: queries, T.
      seq_k: keys, S.
      causal: whether a query sees only keys at or before its own position.
      tile: the tiles of the lists.
      block: tokens along each side of the layout's blocks.
      active_blocks: fraction of blocks that are active, in the past if causal.
      active_tiles: fraction of tiles that are active.
      longest: as given to `make_tile_work`.
    """

    rows: Lists
    columns: Lists
    masks: np.ndarray
    seq_q: int
    seq_k: int
    causal: bool
    tile: Tile
    block: int
    active_blocks: float
    active_tiles: float
    longest: int | None

    @property
    def num_heads(self) -> int:
        """Heads of the work; 1 if it is for any number."""
        return self.rows.row.shape[0]

    @property
    def tiles_q(self) -> int:
        """Tiles of queries."""
        return -(-self.seq_q // self.tile.q)

    @property
    def tiles_k(self) -> int:
        """Tiles of keys."""
        return -(-self.seq_k // self.tile.k)


def make_tile_work(
    layout: BlockLayout,
    seq_q: int,
    seq_k: int,
    *,
    causal: bool,
    tile: Tile | None = None,
    longest: int | None = None,
) -> TileWork:
    """Lay out the work of block-sparse attention.

    Args:
      layout: the active blocks; its last block may exceed the sequence.
      seq_q: queries, T.
      seq_k: keys, S.
      causal: whether a query sees no key after its own position; requires T = S.
      tile: tokens per step; None for 128 x 128 where the kernels run, and otherwise for
        64 x 64, the fastest on a CPU.
      longest: active tiles in a row, or column, above which it is split among several
        programs; None for twice the mean, and at least 16.

    Returns:
      The work; the same object for the same arguments.

    Raises:
      ValueError: if the layout does not have these lengths, or blocks and tiles do not
        nest, or `longest` is below 1.

    Warns:
      UserWarning: if the active tiles are more than twice the active blocks: the
        kernels compute full tiles.

    Example:
      >>> layout = BlockLayout(np.tri(4, dtype=bool), block=64)
      >>> work = make_tile_work(layout, 256, 256, causal=True, tile=Tile(64, 64))
      >>> work.active_tiles, work.rows.count
      (0.625, array([[4, 3, 2, 1]], dtype=int32))
    """
    tile = _usual_tile(layout.block) if tile is None else tile
    return _make_tile_work(layout, seq_q, seq_k, causal, tile, longest)


def _usual_tile(block: int) -> Tile:
    size = 128 if has_kernels() else 64
    nests = size % block == 0 or block % size == 0
    return Tile(size, size) if nests else Tile(block, block)


@functools.lru_cache(maxsize=64)
def _make_tile_work(
    layout: BlockLayout,
    seq_q: int,
    seq_k: int,
    causal: bool,
    tile: Tile,
    longest: int | None,
) -> TileWork:
    _check(layout, seq_q, seq_k, causal=causal, tile=tile, longest=longest)
    blocks = layout.distinct
    if causal:
        blocks = blocks & np.tri(blocks.shape[1], dtype=bool)
    tiles = _Tiles.of(blocks, layout.block, tile, seq_q, seq_k)
    active = tiles.any()
    first_q = tile.q * np.arange(active.shape[1])[:, None]
    first_k = tile.k * np.arange(active.shape[2])
    if causal:
        active &= first_k < first_q + tile.q
    masks, mask = tiles.masks(active)
    full = active & (mask == 0) & (first_k + tile.k <= seq_k)
    if causal:
        full &= first_k + tile.k - 1 <= first_q
    transposed = [array.swapaxes(1, 2) for array in (active, full, mask)]
    work = TileWork(
        rows=make_lists(active, full, mask, longest=longest),
        columns=make_lists(*transposed, longest=longest),
        masks=masks,
        seq_q=seq_q,
        seq_k=seq_k,
        causal=causal,
        tile=tile,
        block=layout.block,
        active_blocks=float(blocks.mean()),
        active_tiles=float(active.mean()),
        longest=longest,
    )
    _warn_if_coarse(work)
    return work


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Blocks, or pieces of blocks, of every tile: [G, tiles q, bq, tiles k, bk]."""

    pieces: np.ndarray

    @classmethod
    def of(
        cls, blocks: np.ndarray, block: int, tile: Tile, seq_q: int, seq_k: int
    ) -> "_Tiles":
        # Along a side a tile is several blocks, or a piece of one.
        shape = [len(blocks)]
        for axis, (size, seq) in enumerate(((tile.q, seq_q), (tile.k, seq_k)), start=1):
            num_tiles, per_tile = -(-seq // size), max(1, size // block)
            blocks = blocks.repeat(max(1, block // size), axis)
            blocks = blocks.take(
                range(min(num_tiles * per_tile, blocks.shape[axis])), axis
            )
            padding = [(0, 0)] * 3
            padding[axis] = (0, num_tiles * per_tile - blocks.shape[axis])
            blocks = np.pad(blocks, padding)
            shape += [num_tiles, per_tile]
        return cls(blocks.reshape(shape))

    def any(self) -> np.ndarray:
        return self.pieces.any((2, 4))

    def masks(self, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """List the distinct masks, the full one first, and the mask of each tile."""
        by_tile = self.pieces.swapaxes(2, 3)
        shape = by_tile.shape[3:]
        found = by_tile[active].reshape(-1, math.prod(shape))
        # Complemented, so that the mask of all blocks sorts first.
        nothing_hidden = np.zeros_like(found[:1], shape=(1, found.shape[1]))
        hidden = np.concatenate([nothing_hidden, ~found])
        distinct, inverse = np.unique(hidden, axis=0, return_inverse=True)
        mask = np.zeros(active.shape, np.int32)
        mask[active] = inverse.reshape(-1)[1:]
        return ~distinct.reshape(-1, *shape), mask


def _check(
    layout: BlockLayout,
    seq_q: int,
    seq_k: int,
    *,
    causal: bool,
    tile: Tile,
    longest: int | None,
) -> None:
    _, blocks_q, blocks_k = layout.blocks.shape
    for name, seq, num_blocks in (
        ("seq_q", seq_q, blocks_q),
        ("seq_k", seq_k, blocks_k),
    ):
        if seq < 1 or -(-seq // layout.block) != num_blocks:
            raise ValueError(
                f"{name}={seq}: the layout has {num_blocks} blocks of {layout.block} "
                f"tokens, for {(num_blocks - 1) * layout.block + 1} to "
                f"{num_blocks * layout.block}; make a layout for this length."
            )
    if causal and seq_q != seq_k:
        raise ValueError(
            f"causal=True with seq_q={seq_q} and seq_k={seq_k}: queries and keys have "
            "the same positions; give equal lengths."
        )
    for name, size in (("q", tile.q), ("k", tile.k)):
        if size < 1 or (size % layout.block and layout.block % size):
            raise ValueError(
                f"tile.{name}={size}: does not nest with blocks of {layout.block}; one "
                f"must be a multiple of the other, as {_sizes_that_nest(layout.block)}."
            )
    if longest is not None and longest < 1:
        raise ValueError(f"longest={longest}: must be 1 tile or more, or None.")


def _sizes_that_nest(block: int) -> str:
    near = [size for size in (32, 64, 128, 256) if not (size % block and block % size)]
    return ", ".join(map(str, near or [block, 2 * block]))


def _warn_if_coarse(work: TileWork) -> None:
    if work.active_tiles > COARSE * work.active_blocks:
        warnings.warn(
            f"blocks of {work.block} on tiles of {work.tile.q} x {work.tile.k}: "
            f"{work.active_blocks:.1%} of blocks are active, but "
            f"{work.active_tiles:.1%} of tiles, and full tiles are computed; larger "
            "blocks, or a smaller tile, reduce the work.",
            stacklevel=4,
        )
