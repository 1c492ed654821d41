"""How is a stacked bar drawn: its pieces to scale, their names, its axis, its marks."""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

INK, MUTED, RED, GREEN = "#1f2328", "#59636e", "#b3261e", "#1a7f4b"
DEEP, PALE, STONE, IDLE, LINKS = "#3b78b0", "#86add2", "#a8b0b8", "#d3d8dd", "#c9733b"

WIDTH, MARGIN, TICKS, LINE = 8.0, 0.2, 0.32, 0.17
"""Inches: a panel, its margins, its ticks and a line of text below it."""
POINTS_PER_INCH = 72.0
FONT = 7.5
CHARACTER = 0.58
"""Width of a character, in heights of the font."""
MOST_LINES = 3
SWATCH = 0.4
"""Inches of a legend's patch and the space around it."""
SEEN = 1e-3
"""Pieces below this fraction of a bar are too small to see, and are not named."""
SCALES = {
    "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
}
"""Unit -> (scale, prefixed unit) of its numbers."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One piece of a stacked bar.

    Attributes:
      name: its label.
      value: bytes or seconds.
      colour: of the piece.
      derived: whether it is derived, not the compiler's number; it is then hatched.
    """

    name: str
    value: int | float
    colour: str
    derived: bool = False


@dataclasses.dataclass(frozen=True)
class Bar:
    """A stacked bar, as wide as a panel.

    Attributes:
      pieces: its pieces, from the left.
      unit: "B" or "s".
      span: the length of its axis.
      marks: vertical lines through it.
    """

    pieces: Sequence[Piece]
    unit: str
    span: float
    marks: tuple[int | float, ...] = ()

    @property
    def names(self) -> list[list[str]]:
        """For each piece, the lines to write into it; empty if there is no room."""
        begin, found = 0.0, []
        for piece in self.pieces:
            room, middle = self._room(piece.value), begin + piece.value / 2
            lines = textwrap.wrap(piece.name, max(room, 1), break_long_words=False)
            lines.append(quantity(piece.value, self.unit))
            longest = max(map(len, lines))
            is_free = all(self._room(2 * abs(m - middle)) > longest for m in self.marks)
            fits = longest <= room and len(lines) <= MOST_LINES
            found.append(lines if fits and is_free else [])
            begin += piece.value
        return found

    @property
    def key(self) -> dict[int, str]:
        """Number -> name and value, of the pieces that are named in the legend."""
        least = SEEN * sum(piece.value for piece in self.pieces)
        named = zip(self.pieces, self.names, strict=True)
        return {
            number: f"{piece.name} {quantity(piece.value, self.unit)}"
            for number, (piece, lines) in enumerate(named)
            if not lines and piece.value > least
        }

    @property
    def key_rows(self) -> int:
        """Rows of the legend."""
        texts = list(self.key.values())
        return math.ceil(len(texts) / key_columns(texts))

    def _room(self, value: int | float) -> int:
        """Characters that fit into a piece of this value."""
        points = POINTS_PER_INCH * (WIDTH - 2 * MARGIN) * value / self.span
        return int(points / (CHARACTER * FONT)) - 2


def stack(axes: Any, bar: Bar) -> None:
    """Draw a bar from 0 to 1, its axis and its legend."""
    begin, drawn = 0.0, []
    for piece, lines in zip(bar.pieces, bar.names, strict=True):
        drawn += axes.barh(
            0,
            piece.value,
            left=begin,
            height=1,
            align="edge",
            color=piece.colour,
            edgecolor=(1, 1, 1, 0.55),
            linewidth=0.7,
            hatch="////" if piece.derived else None,
        )
        if lines:
            axes.text(
                begin + piece.value / 2,
                0.5,
                "\n".join(lines),
                ha="center",
                va="center",
                fontsize=FONT,
                color="white" if piece.colour == DEEP else INK,
            )
        begin += piece.value
    key(axes, [(drawn[number], text) for number, text in bar.key.items()])
    axes.set_xlim(0, bar.span)
    axes.set_yticks([])
    ticks(axes, bar.unit)


def key_columns(texts: Sequence[str]) -> int:
    """Columns of a legend: as many as a panel has room for."""
    longest = max(map(len, texts), default=1)
    inches = SWATCH + CHARACTER * FONT * longest / POINTS_PER_INCH
    return max(min(int((WIDTH - 2 * MARGIN) / inches), len(texts)), 1)


def key(axes: Any, named: Sequence[tuple[Any, str]]) -> None:
    """Draw a legend below the ticks, row by row."""
    if not named:
        return
    width = key_columns([text for _, text in named])
    # A legend is filled column by column.
    columns = [named[first::width] for first in range(width)]
    artists, texts = zip(*itertools.chain(*columns), strict=True)
    inches = axes.get_position().height * axes.figure.get_figheight()
    axes.legend(
        artists,
        texts,
        loc="upper left",
        bbox_to_anchor=(0, -TICKS / inches),
        ncols=width,
    )


def note(axes: Any, text: str, key_rows: int) -> None:
    """Write a line below the legend."""
    axes.annotate(
        text,
        (0, 0),
        xycoords="axes fraction",
        xytext=(0, -POINTS_PER_INCH * (TICKS + LINE * key_rows)),
        textcoords="offset points",
        va="top",
        fontsize=FONT,
        color=MUTED,
    )


def mark(axes: Any, text: str, at: int | float, top: float, colour: str) -> None:
    """Draw a line through a bar up to `top`, with its label there."""
    is_right = at > axes.get_xlim()[1] / 2
    axes.vlines(at, 0, top, color=colour, linewidth=1.4)
    axes.annotate(
        text,
        (at, top - 0.2),
        xytext=(-4 if is_right else 4, 0),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        color=colour,
    )


def ticks(axes: Any, unit: str) -> None:
    """Label the ticks in the unit that suits the axis."""
    most = axes.get_xlim()[1]
    found = [pair for pair in SCALES[unit] if pair[0] <= most]
    scale, name = found[0] if found else SCALES[unit][-1]

    def write(number: float, _: Any) -> str:
        return f"{number / scale:g} {name}" if number else "0"

    axes.xaxis.set_major_formatter(write)


def quantity(number: int | float, unit: str) -> str:
    """Write bytes or seconds to three digits.

    Args:
      number: the quantity; 0 or more.
      unit: "B" or "s".

    Returns:
      The number with a prefixed unit.

    Example:
      >>> quantity(80_812_000_000, "B"), quantity(33, "B"), quantity(0.0123, "s")
      ('80.8 GB', '33 B', '12.3 ms')
    """
    for scale, name in SCALES[unit]:
        if number >= 0.9995 * scale:
            rounded = float(f"{number / scale:.2e}")
            decimals = 0 if name == "B" else max(2 - math.floor(math.log10(rounded)), 0)
            return f"{number / scale:,.{decimals}f} {name}"
    return f"{number:.2g} {unit}"
