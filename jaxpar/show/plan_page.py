"""How is a plan shared: as one self-contained HTML page."""

import html
import string
from pathlib import Path

import jax

from jaxpar.planner.plan import Plan
from jaxpar.planner.sections import Section, headline, notes, sections
from jaxpar.show.page import MOODS, SUFFIXES, frame, table
from jaxpar.show.picture import as_svg, panels
from jaxpar.show.plotting import check_path

_STYLE = """figure { padding: 0.25rem; background: #ffffff; border: var(--line);
  border-radius: 6px; }
figure svg { display: block; width: 100%; height: auto; }
"""
_BODY = string.Template("""<h1>$title</h1>
<p>$subtitle</p>
$sections
<h2>Notes and assumptions</h2>
<ul>$notes</ul>
<footer>Planned with jax $jax. The plan as JSON is in this page, in the element with
the id plan.</footer>
<script type="application/json" id="plan">
$plan
</script>
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
    title, subtitle = headline(plan)
    body = _BODY.substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        sections="".join(_section(plan, each) for each in sections(plan, tokens)),
        notes="".join(f"<li>{html.escape(line)}</li>\n" for line in notes(plan)),
        jax=jax.__version__,
        # In a script element only "<" can end it or open a comment.
        plan=plan.as_json().replace("<", "\\u003c"),
    )
    return frame(f"Plan: {title}", body, style=_STYLE)


def _section(plan: Plan, section: Section) -> str:
    heading, finding = html.escape(section.heading), html.escape(section.finding)
    text = f'<h2>{heading}</h2>\n<p class="{MOODS[section.fits]}">{finding}</p>\n'
    if section.name in panels(plan):
        label = f'<svg role="img" aria-label="{heading}: {finding}"'
        svg = as_svg(plan, section.name).replace("<svg", label, 1)
        text += f"<figure>\n{svg}</figure>\n"
    if section.rows:
        text += table(section.head, section.rows, section.words)
    return text
