"""What does ``jaxpar report`` do: the page of a run, or of two side by side."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class WriteReport:
    """Write one HTML page of a run: curves, rates, memory, goodput, events, settings.

    The page opens without a network, and has everything in the run's folder: it may be
    written while the run goes on, or after it was killed. Curves are drawn by their
    lowest and highest values, so that a spike among a million steps is seen. A plan in
    RUN/plan.json, by jaxpar plan --json, is compared with what was measured.

    With two runs, their curves are laid over each other, and the settings in which they
    differ come first:
    jaxpar report runs/pretrain
    jaxpar report runs/pretrain runs/other --out both.html

    Attributes:
      run: the run's folder.
      other: another run's folder, to compare with.
      out: the file to write, .html; by default report.html in RUN.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    other: Annotated[
        tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RUN2")
    ] = None
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None


def write_run_report(args: WriteReport) -> None:
    """Write the page, and print its path."""
    from jaxpar.show.run_data import distinct_names, read_run  # noqa: PLC0415 - imports jax
    from jaxpar.show.run_page import write_report  # noqa: PLC0415

    folders = [args.run, *([args.other] if args.other is not None else [])]
    runs = distinct_names([read_run(folder) for folder in folders])
    path = args.run / "report.html" if args.out is None else args.out
    write_report(runs, path)
    print(path)
