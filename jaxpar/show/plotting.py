"""How are figures made and saved: in one style, with equal bytes for equal content?"""

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxpar.launch.extras import import_extra

INK, MUTED = "#1f2328", "#59636e"
METADATA: Mapping[str, Mapping[str, None]] = MappingProxyType(
    {
        "png": {"Software": None},
        "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
        "pdf": dict.fromkeys(("Creator", "Producer", "CreationDate")),
    }
)
"""Format -> metadata left out of the file, so that equal content gives equal bytes."""

_STYLE = {
    "font.family": "DejaVu Sans",  # Comes with matplotlib.
    "font.size": 8.0,
    "text.color": INK,
    "text.parse_math": False,  # A "$" in a name is a "$".
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "xtick.color": MUTED,
    "ytick.color": INK,
    "ytick.left": False,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.titlesize": 8.5,
    "figure.titleweight": "bold",
    "hatch.linewidth": 0.8,
    "savefig.dpi": 150,
    "svg.hashsalt": "jaxpar",
}


def import_matplotlib(
    module: str = "matplotlib.figure", needed_by: str = "a picture"
) -> Any:
    """Import one of matplotlib's modules, which only pictures need.

    Raises:
      ModuleNotFoundError: if matplotlib is missing; the message says what to install.
    """
    return import_extra(module, needed_by)


@contextlib.contextmanager
def new_figure(width: float, height: float) -> Iterator[Any]:
    """Make a figure of these inches; draw and save it in this context, in our style."""
    figures = import_matplotlib()
    matplotlib = import_matplotlib("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield figures.Figure((width, height), layout="constrained")


def save(figure: Any, file: str | os.PathLike[str] | io.StringIO, suffix: str) -> None:
    """Lay a figure out and write it, as "png", "svg" or "pdf"."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    # Layouts differ from run to run in their last bits, of which an SVG's ids are made.
    for part in figure.subfigs:
        part.bbox_relative.set_points(part.bbox_relative.get_points().round(9))
    for axes in figure.axes:
        axes.set_position([round(each, 9) for each in axes.get_position().bounds])
    figure.savefig(file, format=suffix, metadata=METADATA[suffix])


def check_path(
    path: Path,
    suffixes: tuple[str, ...] = (".png", ".svg", ".pdf"),
    *,
    flag: str | None = None,
) -> None:
    """Reject a file that can't be written; call it before anything compiles.

    Args:
      path: the file.
      suffixes: those that it may have.
      flag: that named it, for messages; None if it was the argument ``path``.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      ValueError: if it has none of `suffixes`.
      FileNotFoundError: if its folder does not exist.
    """
    import_matplotlib(needed_by=flag or "a picture")
    check_file(path, suffixes, flag=flag)


def check_file(
    path: Path, suffixes: Sequence[str] | None = None, *, flag: str | None = None
) -> None:
    """Reject a file that can't be written, of any kind; as `check_path`.

    Args:
      path: the file.
      suffixes: those that it may have; None for any.
      flag: that named it, for messages; None if it was the argument ``path``.

    Raises:
      ValueError: if it has none of `suffixes`.
      FileNotFoundError: if its folder does not exist.
    """
    named = f"path={str(path)!r}" if flag is None else f"{flag} {path}"
    if suffixes is not None and path.suffix.lower() not in suffixes:
        raise ValueError(f"{named} must end in {' or '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{named}: the folder {str(path.parent)!r} does not exist; make it first."
        )
