"""How is a chart drawn: lines over steps, as part of a page.

The curves are SVG that is stretched to its box, with strokes that keep their width; all
text is HTML beside it. So text is as large on a telephone as on a wide screen. Lines
carry the steps and values of their points, which `jaxpar.show.hover` shows.
"""

import dataclasses
import html
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpar.show.quantities import number, tick
from jaxpar.show.scale import Scale, choose_scale
from jaxpar.show.series import Series, thin

WIDTH, HEIGHT = 2000, 1000
"""Of a drawing, before it is stretched."""
_MOST_FLAGS = 200
"""Of the width: marks in the same of so many pieces share a flag."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
      label: its name; empty where the chart's title says it.
      series: its points.
      colour: "first", "second" or "third", of the page's variables.
      look: "line"; "faint" for one that is behind another, without a key; "dots" for
        one with a few points.
      note: said beside the label where a pointer is.
    """

    label: str
    series: Series
    colour: str = "first"
    look: str = "line"
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at a step.

    Attributes:
      step: the step.
      text: what happened.
      kind: "bad", "changed" or "opened".
    """

    step: float
    text: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over the same steps.

    Attributes:
      title: what is drawn.
      lines: at least one, with at least one finite value in all.
      marks: drawn as vertical lines.
      unit: of the values.
      from_zero: whether values are shown from 0.
      tall: whether it is higher than others.
    """

    title: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    unit: str = ""
    from_zero: bool = False
    tall: bool = False


def draw_chart(
    chart: Chart, span: tuple[int | float, int | float], points: int = 600
) -> str:
    """Draw a chart.

    Args:
      chart: the chart.
      span: the first and last step that it shows.
      points: of a line, at most.

    Returns:
      A ``<figure>``.
    """
    finite = [line.series.finite() for line in chart.lines]
    values = np.concatenate([each.values for each in finite])
    y = choose_scale(values, from_zero=chart.from_zero)
    x = Scale(span[0], span[1] if span[1] > span[0] else span[0] + 1)
    parts = [
        f'<figure class="chart{" tall" * chart.tall}">\n{_caption(chart, finite)}',
        f'<div class="plot" role="img" tabindex="0" aria-label="{_spoken(chart)}">\n',
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        'aria-hidden="true">\n',
        _grid(y),
        *_rules(chart.marks, x),
        *(_path(line, chart.title, x, y, points) for line in chart.lines),
        "</svg>\n",
        *_labels(x, y),
        *_flags(chart.marks, x),
        f"</div>\n{_aside(values, y)}</figure>\n",
    ]
    return "".join(parts)


def _caption(chart: Chart, finite: Sequence[Series]) -> str:
    unit = f'<span class="unit">{html.escape(chart.unit)}</span>' if chart.unit else ""
    keys = ""
    for line, series in zip(chart.lines, finite, strict=True):
        if line.look != "faint":
            last = f" {number(series.values[-1])}" if len(series) else ""
            swatch = f'<i class="{line.colour} {line.look}"></i>' if line.label else ""
            keys += f"<span>{swatch}{html.escape(line.label)}{last}</span>"
    return f"<figcaption><b>{html.escape(chart.title)}</b>{unit}{keys}</figcaption>\n"


def _spoken(chart: Chart) -> str:
    """What a screen reader says of a chart."""
    ends = []
    for line in chart.lines:
        found = line.series.finite()
        if line.look != "faint" and len(found):
            first, last = number(found.values[0]), number(found.values[-1])
            ends.append(
                f"{line.label} from {first} at step {found.steps[0]:,.0f} "
                f"to {last} at step {found.steps[-1]:,.0f}".lstrip()
            )
    return html.escape(f"{chart.title}: {'; '.join(ends)}")


def _aside(values: np.ndarray, y: Scale) -> str:
    above = values[values > y.high]
    if not len(above):
        return ""
    are = "value is" if len(above) == 1 else "values are"
    text = f"{len(above):,} {are} above {number(y.high)}, up to {number(above.max())}"
    return f'<p class="aside">{text}, and drawn at the upper edge.</p>\n'


def _grid(y: Scale) -> str:
    down = HEIGHT * (1 - y.place(np.array(y.ticks())))
    lines = "".join(f"M0 {each:.0f}h{WIDTH}" for each in down)
    return f'<path class="grid" d="{lines}"/>\n'


def _labels(x: Scale, y: Scale) -> Iterator[str]:
    for kind, side, scale in (("y", "bottom", y), ("x", "left", x)):
        ticks = scale.ticks()
        for value, place in zip(ticks, scale.place(np.array(ticks)), strict=True):
            style = f'class="{kind}" style="{side}:{place:.2%}"'
            yield f"<span {style}>{tick(value)}</span>"
    yield "\n"


def _rules(marks: Sequence[Mark], x: Scale) -> Iterator[str]:
    for kind in dict.fromkeys(mark.kind for mark in marks):
        steps = np.array([mark.step for mark in marks if mark.kind == kind])
        places = np.unique((x.place(steps) * WIDTH).round().astype(int))
        lines = "".join(f"M{place} 0v{HEIGHT}" for place in places)
        yield f'<path class="rule {kind}" d="{lines}"/>\n'


def _flags(marks: Sequence[Mark], x: Scale) -> Iterator[str]:
    """Small signs above the marks, which have their texts."""
    groups: dict[tuple[int, str], list[Mark]] = {}
    for mark in marks:
        place = float(x.place(np.array([mark.step]))[0])
        groups.setdefault((round(place * _MOST_FLAGS), mark.kind), []).append(mark)
    for (_, kind), group in groups.items():
        place = float(x.place(np.array([group[0].step]))[0])
        texts = [f"step {mark.step:,.0f}: {mark.text}" for mark in group[:4]]
        texts += [f"and {len(group) - 4:,} more"] if len(group) > 4 else []
        yield (
            f'<span class="flag {kind}" style="left:{place:.2%}" '
            f'title="{html.escape(chr(10).join(texts))}"></span>\n'
        )


def _path(line: Line, title: str, x: Scale, y: Scale, points: int) -> str:
    """A line, broken where values are not finite; its points' steps and values."""
    series = line.series
    finite = np.flatnonzero(np.isfinite(series.values))
    if not len(finite):
        return ""
    chosen = finite[thin(series.values[finite], points)]
    steps, values = series.steps[chosen], series.values[chosen]
    across = (x.place(steps) * WIDTH).round().astype(int)
    down = ((1 - y.place(values)) * HEIGHT).round().astype(int)
    # Whether a value that is not finite lies between a point and the one before.
    bad = np.cumsum(~np.isfinite(series.values))[chosen]
    begins = np.append(True, bad[1:] > bad[:-1]) | (line.look == "dots")
    places = [f"{a} {b}" for a, b in zip(across, down, strict=True)]
    ends = np.append(begins[1:], True)
    drawn = "".join(
        f"{'M' if begin else 'L'}{place}{'h0' if begin and end else ''}"
        for place, begin, end in zip(places, begins, ends, strict=True)
    )
    joined = (
        f'<path class="{line.colour} joined" d="M{"L".join(places)}"/>\n'
        if line.look == "dots" and len(places) > 1
        else ""
    )
    name = ", ".join(filter(None, (line.label or title, line.note)))
    return (
        f'{joined}<path class="{line.colour} {line.look}" d="{drawn}" '
        f'data-name="{html.escape(name)}" '
        f'data-x="{" ".join(f"{step:.0f}" for step in steps)}" '
        f'data-y="{" ".join(map(number, values))}"/>\n'
    )
