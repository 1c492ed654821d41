"""``jaxpar layout``: shows the blocks of a sparse attention pattern."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from jaxpar.launch.extras import import_extra
from jaxpar.sparse_attention import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Variable,
    make_layout,
)

Pattern = (
    Annotated[Dense, tyro.conf.subcommand("dense")]
    | Annotated[Fixed, tyro.conf.subcommand("fixed")]
    | Annotated[Variable, tyro.conf.subcommand("variable")]
    | Annotated[BigBird, tyro.conf.subcommand("bigbird")]
    | Annotated[BSLongformer, tyro.conf.subcommand("longformer")]
    | Annotated[LocalSlidingWindow, tyro.conf.subcommand("sliding")]
)


@dataclasses.dataclass(frozen=True)
class ShowLayout:
    """Show a sparse attention layout: its blocks, and the fraction that is active.

    jaxpar layout --seq-len 512 fixed --num-heads 4 --num-local-blocks 8

    Attributes:
      pattern: the pattern, with its own flags.
      seq_len: tokens, a multiple of the pattern's block.
      head: the head to draw.
      png: draw it to scale into this file too (needs matplotlib).
    """

    pattern: tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[Pattern]]
    seq_len: int = 1024
    head: int = 0
    png: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None


def show_layout(args: ShowLayout) -> None:
    """Print a layout, and draw it if a file is named."""
    from jaxpar.show.sparse_attention import draw, report  # noqa: PLC0415 - jax

    if args.png is not None:
        import_extra("matplotlib.figure", "--png")
    layout = make_layout(args.pattern, args.seq_len)
    if args.png is not None:
        draw(layout, args.head, args.png)
    console = Console(highlight=False)
    causal = args.pattern.attention == "unidirectional"
    text = report(layout, args.head, console.width, causal=causal)
    console.print(Text(text), soft_wrap=True)
