"""How is a plan drawn: one picture with the panels that it has numbers for."""

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxpar.planner.plan import Plan
from jaxpar.show.bars import INK, MARGIN, MUTED, WIDTH
from jaxpar.show.panels import panels
from jaxpar.show.plotting import import_matplotlib

FORMATS: Mapping[str, Mapping[str, None]] = MappingProxyType(
    {
        ".png": {"Software": None},
        ".svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
        ".pdf": dict.fromkeys(("Creator", "Producer", "CreationDate")),
    }
)
"""Suffix -> metadata left out of the file, so that equal plans give equal bytes."""

DOTS_PER_INCH = 150
HEADING, TITLE = 0.58, 0.3
"""Inches of the picture's heading and of a panel's."""

_STYLE = {
    "font.family": "DejaVu Sans",  # Comes with matplotlib.
    "font.size": 8.0,
    "text.color": INK,
    "text.parse_math": False,  # A "$" in a name is a "$".
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.color": MUTED,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 8.0,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0.0,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.handleheight": 0.9,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.0,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "path",
    "svg.hashsalt": "jaxpar",
}


def draw(plan: Plan, path: Path) -> None:
    """Draw a plan: memory, traffic, the estimate and the pipeline, where known.

    Args:
      plan: the plan.
      path: the file to write: .png, .svg or .pdf.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      ValueError: if the suffix is not one of these.
      OSError: if `path` can't be written.
    """
    check_path(path)
    suffix = path.suffix.lower()
    with styled():
        make_figure(plan).savefig(
            path, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=FORMATS[suffix]
        )


def check_path(path: Path, suffixes: Sequence[str] = tuple(FORMATS)) -> None:
    """Reject a file that can't be written; call it before anything compiles.

    Args:
      path: the file.
      suffixes: the accepted suffixes.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      ValueError: if it has none of `suffixes`.
      FileNotFoundError: if its folder does not exist.
    """
    import_matplotlib("matplotlib.figure")
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"path={str(path)!r} must end in {' or '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"path={str(path)!r}: there is no folder {str(path.parent)!r}; make it "
            "first."
        )


def as_svg(plan: Plan, name: str) -> str:
    """Draw one panel as an element for HTML.

    Args:
      plan: the plan.
      name: of `jaxpar.show.panels.panels`.

    Returns:
      ``<svg>``; its ids start with the name, because a page has several panels.
    """
    written = io.StringIO()
    with styled():
        figure = make_figure(plan, [name])
        figure.savefig(written, format="svg", metadata=FORMATS[".svg"])
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(r' xmlns(:xlink)?="[^"]*"| version="1.1"', "", text)


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw in our style, whatever the user's own is."""
    matplotlib = import_matplotlib("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def make_figure(plan: Plan, names: Sequence[str] = ()) -> Any:
    """Arrange panels, one below the other.

    Args:
      plan: the plan.
      names: of `jaxpar.show.panels.panels`, drawn without headings; if empty, all
        panels with headings.

    Returns:
      The `matplotlib.figure.Figure`, to be made and saved inside `styled`.
    """
    found = panels(plan)
    shown = [found[name] for name in names or found]
    top, strip = (MARGIN / 2, 0.0) if names else (HEADING, TITLE)
    height = top + sum(strip + panel.inches + panel.below for panel in shown)
    figure = import_matplotlib("matplotlib.figure").Figure(figsize=(WIDTH, height))

    def write(x: float, down: float, text: str, **style: Any) -> None:
        figure.text(x / WIDTH, 1 - down / height, text, va="top", **style)

    if not names:
        first, second = headline(plan)
        write(MARGIN, 0.14, first, fontsize=11, fontweight="bold")
        write(MARGIN, 0.36, second, color=MUTED)
    for panel in shown:
        right, down = WIDTH - MARGIN, top + 0.07
        if not names:
            write(MARGIN, down, panel.heading, fontsize=8.5, fontweight="bold")
            write(right, down, panel.finding, color=panel.colour, ha="right")
        top += strip + panel.inches
        left, bottom = panel.left / WIDTH, 1 - top / height
        wide = (right - panel.left) / WIDTH
        if panel.paint is not None:
            panel.paint(figure.add_axes((left, bottom, wide, panel.inches / height)))
        top += panel.below
    return figure


def headline(plan: Plan) -> tuple[str, str]:
    """The plan's heading, in two lines."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    plural = "s" * (plan.num_devices != 1)
    return (
        f"{plan.target}: {plan.num_devices:,} device{plural}",
        f"{mesh}; ZeRO {plan.zero}; {plan.precision}; {plan.num_params:,} parameters; "
        f"compiled for {plan.compiled_for}",
    )
