"""How is a plan shared: as one self-contained HTML page."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from jaxpar.planner.plan import Plan
from jaxpar.planner.roofline import assumptions
from jaxpar.planner.targets import parse_target
from jaxpar.show.bars import quantity
from jaxpar.show.panels import memory_pieces, panels, verdict
from jaxpar.show.picture import as_svg, check_path, headline

SUFFIXES = (".html", ".htm")
UNKNOWN = "<p>No estimate: the rates of these devices are unknown.</p>\n"

_CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --page: #ffffff; --muted: #59636e;
  --line: #d8dee4; --good: #1a7f4b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --page: #14171b;
  --muted: #9aa4af; --line: #343b44; --good: #56c48c; --bad: #ff8f85; } }
body { margin: 0; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 2rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 0.25rem; }
p { margin: 0.25rem 0; }
.muted, footer { color: var(--muted); }
.verdict { font-weight: 600; font-size: 1.1rem; margin: 0.75rem 0; }
.fits { color: var(--good); }
.over { color: var(--bad); }
figure { margin: 0.75rem 0 1rem; padding: 0.25rem; background: #ffffff;
  border: 1px solid var(--line); border-radius: 6px; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.3rem 0.6rem; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; }
.word { text-align: left; }
footer { margin-top: 2.5rem; font-size: 0.85rem; }
"""


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
    first, second = headline(plan)
    mood = {None: "unknown", True: "fits", False: "over"}[plan.fits]
    below = {"memory": _memory(plan), "traffic": _traffic(plan), "pipeline": ""}
    below["time"] = _time(plan, tokens)
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Plan: {_text(first)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{_text(first)}</h1>\n"
        f'<p class="muted">{_text(second)}</p>\n'
        f'<p class="verdict {mood}">{_text(verdict(plan))}</p>\n',
        *(_section(plan, name) + below[name] for name in panels(plan)),
    ]
    if plan.estimate is None:
        parts += ["<h2>Time of a step</h2>\n", UNKNOWN, below["time"]]
    parts += [_notes(plan), _footer(plan), _json(plan), "</main>\n</body>\n</html>\n"]
    return "".join(parts)


def _text(words: object) -> str:
    return html.escape(str(words))


def _section(plan: Plan, name: str) -> str:
    """A panel under its heading; the memory's finding is the page's verdict."""
    panel = panels(plan)[name]
    heading, finding = _text(panel.heading), _text(panel.finding)
    written = f"<h2>{heading}</h2>\n"
    if name != "memory":
        written += f'<p class="muted">{finding}</p>\n'
    if panel.paint is not None:
        named = f'<svg role="img" aria-label="{heading}: {finding}"'
        svg = as_svg(plan, name).replace("<svg", named, 1)
        written += f"<figure>\n{svg}</figure>\n"
    return written


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], *, words: int) -> str:
    """A table whose first `words` columns are text."""

    def line(cells: Sequence[object], tag: str) -> str:
        kinds = [' class="word"' if n < words else "" for n in range(len(cells))]
        inner = "".join(
            f"<{tag}{kind}>{_text(cell)}</{tag}>"
            for kind, cell in zip(kinds, cells, strict=True)
        )
        return f"<tr>{inner}</tr>\n"

    body = "".join(line(row, "td") for row in rows)
    return (
        f'<div class="wide"><table>\n<thead>\n{line(head, "th")}</thead>\n'
        f"<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _memory(plan: Plan) -> str:
    memory, told = plan.memory, {True: "derived", False: "the compiler's"}
    found = [(p.name, told[p.derived], p.value) for p in memory_pieces(plan)]
    found.append(("padding, of the state", told[True], memory.padding))
    found.append(("temporaries, total", told[False], memory.temporaries))
    found.append(("peak", told[False], memory.peak))
    head = ["", "figure", "size", "bytes"]
    rows = [[name, by, quantity(n, "B"), f"{n:,}"] for name, by, n in found]
    whole = plan.device_memory_bytes
    if whole is not None:
        head.append("of the device")
        device = ["device", "the hardware's", quantity(whole, "B"), f"{whole:,}", ""]
        shares = [f"{number / whole:.1%}" for _, _, number in found]
        rows = [[*row, share] for row, share in zip(rows, shares, strict=True)]
        rows.append(device)
    return _table(head, rows, words=2)


def _traffic(plan: Plan) -> str:
    rows = [
        (
            row.kind,
            " x ".join(row.axes) or "none",
            row.dtype,
            f"{row.count:,}",
            f"{row.group_size:,}",
            quantity(row.bytes, "B"),
            quantity(row.sent_bytes, "B"),
        )
        for row in plan.program.collectives
    ]
    if not rows:
        return "<p>The program has no collective.</p>\n"
    head = ["", "over", "dtype", "times", "group", "unsharded", "sent by a device"]
    found = _table(head, rows, words=3)
    if plan.links is not None:
        links = [
            ("to devices of its host", quantity(plan.links.inside_host, "B")),
            ("by groups that span hosts", quantity(plan.links.between_hosts, "B")),
        ]
        found += _table(["", "sent by a device"], links, words=1)
    return found


def _time(plan: Plan, tokens: float | None) -> str:
    rows = [
        ("matmul FLOPs of the model", f"{plan.model_flops_per_step:.3g}"),
        ("with recomputation", f"{plan.flops_per_step:.3g}"),
    ]
    found = plan.estimate
    if found is not None:
        rows += [
            ("matmuls", quantity(found.products_seconds, "s")),
            ("other kernels", quantity(found.memory_seconds, "s")),
            ("collectives", quantity(found.links_seconds, "s")),
            ("of these, exposed", quantity(found.exposed_seconds, "s")),
            (f"bubble, {found.bubble:.1%}", quantity(found.bubble_seconds, "s")),
            ("the step", quantity(found.step_seconds, "s")),
            ("MFU", f"{found.mfu:.1%}"),
        ]
    if plan.tokens_per_second is not None:
        rows.append(("tokens per second", f"{plan.tokens_per_second:,.0f}"))
    hours = None if tokens is None else plan.device_hours(tokens)
    if hours is not None:
        rows.append((f"device-hours of {tokens:.3g} tokens", f"{hours:,.0f}"))
    return _table(["of a step", ""], rows, words=1)


def _notes(plan: Plan) -> str:
    found = _list("Notes", plan.notes)
    if plan.estimate is not None:
        found += _list("Assumptions", assumptions(parse_target(plan.target)))
    return found


def _list(heading: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>\n" for line in lines)
    return f"<h2>{heading}</h2>\n<ul>\n{items}</ul>\n" if items else ""


def _footer(plan: Plan) -> str:
    return (
        f"<footer>Planned with jax {_text(jax.__version__)}; compiled for "
        f"{_text(plan.compiled_for)} in {plan.compile_seconds:.1f} s. The plan as JSON "
        f"is in this page, in the element with the id plan.</footer>\n"
    )


def _json(plan: Plan) -> str:
    # In a script element only "<" can end it or open a comment.
    text = plan.as_json().replace("<", "\\u003c")
    return f'<script type="application/json" id="plan">\n{text}\n</script>\n'
