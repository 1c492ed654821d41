"""How is exposed communication shown: a sentence, and a row for each kind of it."""

from collections.abc import Iterator

from rich import box
from rich.table import Table

from jaxpar.compiled.exposed import Communication, Exposed

HEAD = ("collective", "over", "times", "sync", "sent MB", "wire ms", "exposed ms")
WORDS = 2
"""Leading columns of text; the others are numbers."""

_UNKNOWN = (
    "exposed communication is not known: only a program for GPUs whose rates are known "
    "has a schedule that can be read"
)


def finding(found: Communication) -> str:
    """Say how much of the communication is exposed.

    Example:
      >>> finding(Communication(kernel_seconds=0.4, collectives=()))
      '0.0 of 0.0 ms of communication are exposed'
    """
    exposed, wire = found.exposed_seconds, found.wire_seconds
    return f"{1e3 * exposed:.1f} of {1e3 * wire:.1f} ms of communication are exposed"


def summary_of(found: Communication | None) -> str:
    """Say in a line what is exposed and what that is based on; or why it is unknown."""
    if found is None:
        return _UNKNOWN
    plural = "s" * (found.devices_per_host != 1)
    return (
        f"{finding(found)} by the compiled schedule, at assumed rates, with "
        f"{found.devices_per_host} device{plural} a host; nothing is measured"
    )


def exposed_table(found: Communication) -> Table:
    """A table of the collectives, most exposed first."""
    table = Table(box=box.SIMPLE)
    for number, column in enumerate(HEAD):
        table.add_column(column, justify="left" if number < WORDS else "right")
    for cells in table_rows(found):
        table.add_row(*cells)
    return table


def table_rows(found: Communication) -> Iterator[tuple[str, ...]]:
    """The cells of a row for each kind of collective, most exposed first."""
    return map(_cells, found.by_kind)


def _cells(row: Exposed) -> tuple[str, ...]:
    return (
        row.kind,
        " x ".join(row.axes) or "none",
        f"{row.count:,}",
        f"{row.num_sync:,}",
        f"{row.sent_bytes / 1e6:,.1f}",
        f"{1e3 * row.wire_seconds:,.1f}",
        f"{1e3 * row.exposed_seconds:,.1f}",
    )
