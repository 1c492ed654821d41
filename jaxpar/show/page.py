"""What do pages share: their frame, their look in light and dark, their tables?

A page is one file that opens without a network: no link, no font, no script from
elsewhere. Colours are CSS variables, so that pictures drawn with them are readable on a
light and on a dark screen.
"""

import html
import string
from collections.abc import Iterable, Sequence

SUFFIXES = (".html", ".htm")

MOODS = {None: "", True: "fits", False: "over"}
"""Whether something is good news -> its class of the style."""

_PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: 1px solid #8886; --good: #1d8350;
  --bad: #c9372c; --muted: #59636e; --grid: #8883; --first: #2a6fc9; --second: #cf5a1e;
  --third: #7d4fc4; --panel: #8881; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb970; --bad: #ff7b72;
  --muted: #9aa4af; --grid: #8884; --first: #62a3f5; --second: #f2904f;
  --third: #b894f4; } }
body { max-width: $width; margin: 0 auto; padding: 2rem 1rem 3rem;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 0.25rem; }
p { margin: 0.25rem 0; }
footer { opacity: 0.7; margin-top: 2.5rem; font-size: 0.85rem; }
.fits, .over { color: var(--good); font-weight: 600; }
.over { color: var(--bad); }
figure { margin: 0.75rem 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.3rem 0.6rem; white-space: nowrap;
  border-bottom: var(--line); }
.word { text-align: left; }
$style</style>
</head>
<body>
$body</body>
</html>
""")


def frame(title: str, body: str, *, style: str = "", width: str = "860px") -> str:
    """A page.

    Args:
      title: of the window; any text.
      body: HTML, whose texts are escaped.
      style: CSS beside that of all pages.
      width: of the text at most, in CSS.
    """
    return _PAGE.substitute(
        title=html.escape(title), body=body, style=style, width=width
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table, which scrolls on its own where the screen is narrow.

    Args:
      head: names of columns; any text.
      rows: cells; any text.
      words: leading columns of text; the others are numbers.
    """
    body = "".join(_row(row, "td", words) for row in rows)
    text = f"{_row(head, 'th', words)}{body}"
    return f'<div class="wide"><table>\n{text}</table></div>\n'


def _row(cells: Sequence[str], tag: str, words: int) -> str:
    """A table's row, whose first cells are words."""
    row = "<tr>"
    for number, cell in enumerate(cells):
        kind = ' class="word"' if number < words else ""
        row += f"<{tag}{kind}>{html.escape(cell)}</{tag}>"
    return f"{row}</tr>\n"
