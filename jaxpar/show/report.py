"""How is a plan shared: as one self-contained HTML page."""

import html
import string
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxpar.planner.plan import Plan
from jaxpar.show.picture import as_svg, panels
from jaxpar.show.plotting import check_path
from jaxpar.show.sections import Section, headline, notes, sections

SUFFIXES = (".html", ".htm")
_MOODS = {None: "", True: "fits", False: "over"}

_PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plan: $title</title>
<style>
:root { color-scheme: light dark; --line: 1px solid #8886; }
body { max-width: 860px; margin: 0 auto; padding: 2rem 1rem 3rem;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 0.25rem; }
p { margin: 0.25rem 0; }
footer { opacity: 0.7; margin-top: 2.5rem; font-size: 0.85rem; }
.fits, .over { color: #23945c; font-weight: 600; }
.over { color: #d9483f; }
figure { margin: 0.75rem 0 1rem; padding: 0.25rem; background: #ffffff;
  border: var(--line); border-radius: 6px; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.3rem 0.6rem; white-space: nowrap;
  border-bottom: var(--line); }
.word { text-align: left; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$subtitle</p>
$sections
<h2>Notes and assumptions</h2>
<ul>$notes</ul>
<footer>Planned with jax $jax. The plan as JSON is in this page, in the element with
the id plan.</footer>
<script type="application/json" id="plan">
$plan
</script>
</body>
</html>
""")


def write_html(plan: Plan, path: Path, *, tokens: float | None = None) -> None:
    """Write a plan as a page: its panels, its tables, its notes, its JSON.

    Args:
      plan: the plan.
      path: the file to write: .html or .htm.
      tokens: of the whole run, to print its cost.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      ValueError: if the suffix is not one of these.
      OSError: if `path` can't be written.
    """
    check_path(path, SUFFIXES)
    path.write_text(as_html(plan, tokens=tokens), encoding="utf-8")


def as_html(plan: Plan, *, tokens: float | None = None) -> str:
    """The page that `write_html` writes."""
    title, subtitle = map(html.escape, headline(plan))
    return _PAGE.substitute(
        title=title,
        subtitle=subtitle,
        sections="".join(_section(plan, each) for each in sections(plan, tokens)),
        notes="".join(f"<li>{html.escape(line)}</li>\n" for line in notes(plan)),
        jax=jax.__version__,
        # In a script element only "<" can end it or open a comment.
        plan=plan.as_json().replace("<", "\\u003c"),
    )


def _section(plan: Plan, section: Section) -> str:
    heading, finding = html.escape(section.heading), html.escape(section.finding)
    text = f'<h2>{heading}</h2>\n<p class="{_MOODS[section.fits]}">{finding}</p>\n'
    if section.name in panels(plan):
        label = f'<svg role="img" aria-label="{heading}: {finding}"'
        svg = as_svg(plan, section.name).replace("<svg", label, 1)
        text += f"<figure>\n{svg}</figure>\n"
    if section.rows:
        head = _row(section.head, "th", section.words)
        body = "".join(_row(row, "td", section.words) for row in section.rows)
        text += f'<div class="wide"><table>\n{head}{body}</table></div>\n'
    return text


def _row(cells: Sequence[str], tag: str, words: int) -> str:
    """A table's row, whose first cells are words."""
    row = "<tr>"
    for number, cell in enumerate(cells):
        kind = ' class="word"' if number < words else ""
        row += f"<{tag}{kind}>{html.escape(cell)}</{tag}>"
    return f"{row}</tr>\n"
