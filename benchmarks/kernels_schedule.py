"""What does the order of a kernel's programs cost block-sparse attention, by replay?

For each pattern and pass: the time of the last multiprocessor of an H200 over the mean
of all 132, in tiles. In the order of the sequence; with the longest items first, as the
lists have them; and in a persistent grid. Nothing is timed.

    python benchmarks/kernels_schedule.py
"""

import dataclasses
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.kernels.attention import HEADS, Case, named
from benchmarks.kernels.schedule import Spans
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from kernels_pallas.block_sparse_attention.lists import Lists
from kernels_pallas.block_sparse_attention.mosaic.device_lists import group_columns

SEQ_LEN = 32_768


@dataclasses.dataclass(frozen=True)
class Config:
    """What to replay."""

    kv_heads: int = HEADS
    """Key heads of 16 query heads."""
    starts: tuple[float, ...] = (0.0, 1.0)
    """Tiles in whose time a program starts and ends."""
    write: bool = True
    """Write benchmarks/results/kernels_schedule.json."""


def cases() -> Iterator[Case]:
    """Patterns whose rows, or columns, are of very different lengths."""
    yield named("causal", "dense", SEQ_LEN)
    yield named("window of 2048", "sliding", SEQ_LEN, 2048)
    yield named("bigbird", "bigbird", SEQ_LEN)
    yield named("longformer", "longformer", SEQ_LEN)


def passes(case: Case, kv_heads: int) -> Iterator[tuple[str, Lists, int]]:
    """The lists of the kernels, and their heads."""
    yield "rows", case.work.rows, HEADS
    columns = group_columns(case.work, HEADS // kv_heads, kv_heads)
    yield "columns", columns, kv_heads


def main(config: Config) -> None:
    """Replay, print and write."""
    warnings.simplefilter("ignore", UserWarning)  # Of coarse tiles.
    found = {}
    for case in cases():
        for name, lists, heads in passes(case, config.kv_heads):
            counts = lists.count[lists.row >= 0]
            for start in config.starts:
                spans = dataclasses.asdict(Spans.of(lists, heads, start=start))
                sizes = {
                    "programs": lists.row.shape[1] * heads,
                    "longest": int(counts.max()),
                    "mean": float(counts.mean()),
                }
                found[f"{case.name}, {name}, {start:g} to start"] = sizes | spans
    columns = list(next(iter(found.values())))
    table = Table(title=f"{SEQ_LEN} tokens, {HEADS} heads; spans over mean", box=None)
    for column in ("", *columns):
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{row[column]:.5g}" for column in columns))
    Console(highlight=False, soft_wrap=True, width=200).print(table)
    if config.write:
        print(f"written: {write_result('kernels_schedule', found).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
