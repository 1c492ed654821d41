"""How is a block layout shown: as text in a terminal, or drawn?"""

import os
import warnings

import numpy as np

from jaxpar.show.plotting import new_figure, save
from kernels_pallas.block_sparse_attention import BlockLayout, Tile, make_tile_work

SHADES = " ░▒▓█"
"""Characters of a cell of several blocks, by the fraction that is active."""

TILES = (Tile(64, 64), Tile(128, 128))
CELL_INCHES = 0.12
MOST_INCHES = 12.0


def chart(layout: BlockLayout, head: int, width: int) -> list[str]:
    """Draw a head's blocks in characters, one row of queries per line.

    Args:
      layout: the layout.
      head: which head.
      width: columns of the terminal.

    Returns:
      The lines. A cell is two characters wide: a block, or a square of blocks if there
      are too many to fit; the more of them are active, the darker.

    Example:
      >>> print(*chart(BlockLayout(np.eye(3, dtype=bool), 16), 0, 80), sep="|")
      ██    |  ██  |    ██
    """
    blocks = layout.blocks[head]
    size = max(1, -(-2 * blocks.shape[1] // width))
    cells = _shares(blocks, size)
    # Rounded up, so that only a cell without active blocks looks empty.
    shades = np.ceil(cells * (len(SHADES) - 1)).astype(int)
    return ["".join(2 * SHADES[shade] for shade in row) for row in shades]


def report(layout: BlockLayout, head: int, width: int, *, causal: bool) -> str:
    """Print a layout's cost and one head's chart.

    Args:
      layout: the layout.
      head: which head.
      width: columns of the terminal.
      causal: whether attention is causal.

    Returns:
      Lines of text.

    Raises:
      ValueError: if there is no such head.
    """
    _check_head(layout, head)
    num_q, num_k = layout.blocks.shape[1:]
    lens = " x ".join(str(n * layout.block) for n in dict.fromkeys((num_q, num_k)))
    different = len(layout.distinct) > 1
    alike = "heads differ" if different else "all heads alike"
    size = max(1, -(-2 * num_k // width))
    of_cell = "a block" if size == 1 else f"{size} x {size} blocks"
    active = [f"{layout.fraction:.1%} of {num_q} x {num_k} blocks"]
    active += [
        f"{share:.1%} of tiles of {tile.q}"
        for tile in TILES
        if (share := _tiles_share(layout, tile, causal=causal)) is not None
    ]
    return "\n".join(
        [
            f"{lens} tokens, blocks of {layout.block}, {layout.num_heads} heads, "
            f"{alike}",
            f"active: {', '.join(active)}",
            f"head {head}, queries down and keys across; a cell is {of_cell}",
            "",
            *chart(layout, head, width),
        ]
    )


def draw(layout: BlockLayout, head: int, file: str | os.PathLike[str]) -> None:
    """Draw a head's blocks to scale.

    Args:
      layout: the layout.
      head: which head.
      file: the PNG to write.

    Raises:
      ValueError: if there is no such head.
      ModuleNotFoundError: if matplotlib is missing.
      OSError: if `file` can't be written.
    """
    _check_head(layout, head)
    blocks = layout.blocks[head]
    inches = min(max(CELL_INCHES * blocks.shape[1], 4.0), MOST_INCHES)
    extent = (0, blocks.shape[1] * layout.block, blocks.shape[0] * layout.block, 0)
    title = f"head {head}, blocks of {layout.block}: {blocks.mean():.1%} active"
    with new_figure(inches + 1, inches + 1) as figure:
        axes = figure.subplots()
        # Where blocks are smaller than dots, a dot is their mean.
        axes.imshow(blocks.astype(float), cmap="Blues", vmin=0, vmax=1, extent=extent)
        axes.set(xlabel="key", ylabel="query", title=title)
        save(figure, file, "png")


def _shares(blocks: np.ndarray, size: int) -> np.ndarray:
    """The active fraction of each square of blocks."""
    padding = [(0, -length % size) for length in blocks.shape]
    there = np.pad(np.ones(blocks.shape), padding)
    padded = np.pad(blocks, padding)
    shape = (padded.shape[0] // size, size, padded.shape[1] // size, size)
    return padded.reshape(shape).sum((1, 3)) / there.reshape(shape).sum((1, 3))


def _tiles_share(layout: BlockLayout, tile: Tile, *, causal: bool) -> float | None:
    """Active tiles over all tiles; None if the tile does not nest with the blocks."""
    if tile.q % layout.block and layout.block % tile.q:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Only the fraction is needed.
        lens = (n * layout.block for n in layout.blocks.shape[1:])
        work = make_tile_work(layout, *lens, causal=causal, tile=tile)
    return work.active_tiles


def _check_head(layout: BlockLayout, head: int) -> None:
    if not 0 <= head < layout.num_heads:
        raise ValueError(
            f"--head {head}: the layout has heads 0 to {layout.num_heads - 1}."
        )
