"""What does the command ``jaxpar`` do: one dataclass and one function per subcommand.

The fields of the dataclass are the flags; `COMMANDS` lists them all. Imports that only
one subcommand needs are in its function, so that the others start fast.
"""

import dataclasses
import difflib
import math
import sys
import typing
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxpar.cli.ckpt import Ckpt, run_ckpt
from jaxpar.cli.hf import Hf, run_hf
from jaxpar.cli.launch import StartRun, start_run
from jaxpar.cli.layout import ShowLayout, show_layout
from jaxpar.cli.plan import ShowPlan, show_plan
from jaxpar.cli.recipes import Recipes, run_recipes
from jaxpar.cli.report import WriteReport, write_run_report
from jaxpar.launch.extras import import_extra
from jaxpar.show.schedule import draw, report


@dataclasses.dataclass(frozen=True)
class ShowSchedule:
    """Show a pipeline schedule: its work by stage and tick, its bubble, its memory.

    Times are those of a micro-batch on one stage, through all its chunks, in any unit;
    a tick lasts as long as its slowest stage.

    Attributes:
      name: gpipe, 1f1b, interleaved or zero_bubble; or pipedream_2bw or pipemare, of
        which a step in the steady state is shown.
      stages: devices on the pipe axis.
      microbatches: micro-batches a step.
      chunks: chunks of blocks on each stage, for interleaved; 2 if not given.
      forward: time of a forward.
      backward: time of a backward; if not given 2, or 1 for zero_bubble, which
        computes gradients of weights separately.
      weight: time of the gradients of weights, for zero_bubble; 1 if not given.
      png: draw it to scale into this file too (needs matplotlib).
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    stages: int
    microbatches: int
    chunks: int | None = None
    forward: float = 1.0
    backward: float | None = None
    weight: float | None = None
    png: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None


def show_schedule(args: ShowSchedule) -> None:
    """Print a schedule, and draw it if a file is named."""
    from jaxpar.pipeline.schedules.catalog import make_schedule  # noqa: PLC0415 - imports jax

    if args.png is not None:
        import_extra("matplotlib.figure", "--png")
    name = args.name if args.chunks is None else f"{args.name}:{args.chunks}"
    schedule = make_schedule(name, args.stages, args.microbatches)
    times = _times(args, splits_backward=schedule.splits_backward)
    if args.png is not None:
        draw(schedule, times, args.png)
    console = Console(highlight=False)
    console.print(report(schedule, times, console.width), soft_wrap=True)


def _times(args: ShowSchedule, *, splits_backward: bool) -> dict[str, float]:
    if args.weight is not None and not splits_backward:
        raise ValueError(
            f"--weight {args.weight:g}: {args.name} computes weight gradients in its "
            "backward; omit --weight and give --backward the time of both."
        )
    usual = (1.0, 1.0) if splits_backward else (2.0, 0.0)
    given = {"forward": args.forward, "backward": args.backward, "weight": args.weight}
    for flag, time in given.items():
        if time is not None and not 0 < time < math.inf:
            raise ValueError(f"--{flag} {time:g} must be a time above 0.")
    return {
        "forward": args.forward,
        "backward": usual[0] if args.backward is None else args.backward,
        "weight": usual[1] if args.weight is None else args.weight,
    }


@dataclasses.dataclass(frozen=True)
class ShowEnvironment:
    """Show versions, devices and what can be planned here: for a bug report."""

    disk: Path | None = None
    """A folder whose disk is measured, as offload to disk uses it: a few seconds."""


def show_environment(args: ShowEnvironment) -> None:
    """Print the environment."""
    from jaxpar.planner.environment import describe  # noqa: PLC0415 - imports jax

    if args.disk is not None and not args.disk.is_dir():
        raise ValueError(f"--disk {args.disk} is not a folder; make it first.")
    for name, value in describe(args.disk).items():
        print(f"{name:<20} {value}")


COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "ckpt": (Ckpt, run_ckpt),
    "env": (ShowEnvironment, show_environment),
    "hf": (Hf, run_hf),
    "launch": (StartRun, start_run),
    "layout": (ShowLayout, show_layout),
    "plan": (ShowPlan, show_plan),
    "recipes": (Recipes, run_recipes),
    "report": (WriteReport, write_run_report),
    "schedule": (ShowSchedule, show_schedule),
}
"""Subcommand -> its arguments and its function."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
      args: the arguments; None for the process's own.

    Raises:
      SystemExit: for ``--help`` (0) and for errors (2), after printing the message.
    """
    given = list(sys.argv[1:] if args is None else args)
    if given == ["--version"]:
        print(f"jaxpar {metadata.version('jaxpar')}")
        return
    _check_command(given)
    own, flags = _cut(given)
    chosen = tyro.extras.subcommand_cli_from_dict(
        {name: config for name, (config, _) in COMMANDS.items()},
        prog="jaxpar",
        description="Tools beside a training run.",
        args=own,
    )
    run = dict(COMMANDS.values())[type(chosen)]
    try:
        run(_with_flags(chosen, tuple(flags)))
    except (ValueError, OSError, ModuleNotFoundError, RuntimeError) as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _check_command(given: Sequence[str]) -> None:
    """End for a subcommand that there is not, with the one that may be meant."""
    _check_word("", given[:1], list(COMMANDS))
    if given and given[0] in COMMANDS:
        config, _ = COMMANDS[given[0]]
        _check_word(f" {given[0]}", given[1:2], _subcommands(config))


def _check_word(command: str, word: Sequence[str], known: Sequence[str]) -> None:
    if not known or not word or word[0].startswith("-") or word[0] in known:
        return
    close = difflib.get_close_matches(word[0], known, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    print(
        f"jaxpar{command}: there is no command {word[0]!r}.{guess} The commands are "
        f"{', '.join(known)}.",
        file=sys.stderr,
    )
    raise SystemExit(2)


def _subcommands(config: type) -> list[str]:
    """The names of a subcommand's own subcommands."""
    found: list[str] = []
    for hint in typing.get_type_hints(config, include_extras=True).values():
        union = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        for member in typing.get_args(union):
            marks = getattr(member, "__metadata__", ())
            found += [mark.name for mark in marks if getattr(mark, "name", None)]
    return found


def _with_flags(chosen: Any, flags: tuple[str, ...]) -> Any:
    """Pass on the flags after ``--``."""
    if not flags:
        return chosen
    if isinstance(chosen, ShowPlan):
        return dataclasses.replace(chosen, flags=flags)
    if isinstance(chosen, StartRun):
        return chosen.with_flags(flags)
    raise ValueError("only plan and launch take flags after --.")


def _cut(args: list[str]) -> tuple[list[str], list[str]]:
    """Arguments before and after ``--``."""
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at + 1 :]
