"""What does ``jaxpar plan`` do: one recipe on a target, or the best of many choices."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.status import Status

from jaxpar.progress import waiting

if TYPE_CHECKING:
    from jaxpar.planner.choices import Choice
    from jaxpar.planner.plan import Plan


@dataclasses.dataclass(frozen=True)
class ShowPlan:
    """Plan a recipe on hardware that you don't have: memory, traffic, time.

    Compiles the recipe's own training step for the target, in a subprocess, and reads
    the compiled program; nothing runs, and nothing is allocated. Flags of the recipe
    follow after --:
    jaxpar plan recipes/pretrain.py --target h200:8x8 -- --model 7b --precision bf16

    With --search, ranks meshes, ZeRO stages, micro-batches, schedules and remat
    policies that fit by estimated tokens per second: closed forms prune, the most
    promising are compiled. Fields that you set after -- are not searched.

    With --compare, compiles the choices that you name and prints one table of memory,
    traffic and time, and which is the best compromise, and why.

    Attributes:
      recipe: a Python file with a dataclass Config and build(config, mesh).
      target: a100, h100, h200 or b200:HOSTSxGPUS; v5e or v6e:XxY, v5p:XxYxZ; cpu:N.
      tokens: of the whole run, to print its device-hours.
      json: also write the plan, or the search, into this file.
      png: draw the plan into this file (.png, .svg or .pdf; needs matplotlib).
      html: write the plan, with its pictures, into this file (needs matplotlib).
      search: rank choices instead; the pictures are then of the best one.
      compare: choices to compare, such as "zero=1; zero=3 mesh.tensor=2", or "usual":
        data parallelism, ZeRO 1 to 3, tensor parallelism and a pipeline.
      compiles: steps to compile at most, in a search.
      fix: if the plan does not fit, compile up to four changes that may make it fit.
    """

    recipe: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RECIPE")]
    target: str
    tokens: float | None = None
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    png: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    search: bool = False
    compare: str | None = None
    compiles: int = 16
    fix: bool = True
    flags: tyro.conf.Suppress[tuple[str, ...]] = ()


def show_plan(args: ShowPlan) -> None:
    """Print a plan or a search, and write the files that are named."""
    from jaxpar.planner.targets import parse_target  # noqa: PLC0415 - imports jax

    parse_target(args.target)
    _check_files(args)
    if args.compare is not None:
        _compare(args, args.compare, Console())
    else:
        (_search if args.search else _plan)(args, Console())


def _check_files(args: ShowPlan) -> None:
    """Check that the files can be written, before anything compiles."""
    from jaxpar.show.page import SUFFIXES  # noqa: PLC0415
    from jaxpar.show.plotting import check_file, check_path  # noqa: PLC0415

    if args.json is not None:
        check_file(args.json, flag="--json")
    if args.png is not None:
        check_path(args.png, flag="--png")
    if args.html is not None:
        check_path(args.html, SUFFIXES, flag="--html")


def _plan(args: ShowPlan, console: Console) -> None:
    from jaxpar.planner.plan_text import show_plan as show  # noqa: PLC0415
    from jaxpar.planner.recipe import plan_in_subprocess  # noqa: PLC0415
    from jaxpar.planner.recipe_search import what_would_fit  # noqa: PLC0415
    from jaxpar.show.search import show_tried  # noqa: PLC0415

    with waiting(f"compiling {args.recipe.name} for {args.target}"):
        plan = plan_in_subprocess(args.recipe, args.target, args.flags)
    _write(args, plan, plan.as_json())
    show(plan, console, tokens=args.tokens)
    if plan.fits is False and args.fix:
        with _status(console, "compiling what may fit") as status:
            tried = what_would_fit(
                args.recipe, plan, args.flags, report=_reporter(status.update)
            )
        show_tried(tried, plan.device_memory_bytes or 0, console)


def _search(args: ShowPlan, console: Console) -> None:
    from jaxpar.planner.plan_text import show_plan as show  # noqa: PLC0415
    from jaxpar.planner.recipe_search import search_recipe, smallest_target  # noqa: PLC0415
    from jaxpar.show.search import as_json, show_search  # noqa: PLC0415

    with _status(console, f"surveying {args.recipe.name} on {args.target}") as status:
        found = search_recipe(
            args.recipe,
            args.target,
            args.flags,
            compiles=args.compiles,
            report=_reporter(
                lambda line: (console.print(line), status.update("compiling"))
            ),
        )
    show_search(found, console)
    if found.ranking:
        choice, plan = found.ranking[0]
        console.print(f"the fastest: {' '.join(choice.flags(found.survey.knobs))}\n")
        _write(args, plan, as_json(found))
        show(plan, console, tokens=args.tokens)
        return
    _write(args, None, as_json(found))
    with _status(console, "looking for the smallest target that fits") as status:
        larger = smallest_target(
            args.recipe, args.target, args.flags, report=_reporter(status.update)
        )
    if larger is None:
        raise ValueError(f"{args.recipe.name} fits neither {args.target} nor larger.")
    raise ValueError(
        f"{args.recipe.name} does not fit {args.target} with any choice; the "
        f"smallest target that fits is {larger[0]}: "
        f"{' '.join(larger[1].flags(found.survey.knobs))}"
    )


def _compare(args: ShowPlan, text: str, console: Console) -> None:
    from jaxpar.planner.compare import compare_recipe, read_choices  # noqa: PLC0415
    from jaxpar.show.compare import as_json, show_comparison  # noqa: PLC0415

    choices = read_choices(text)
    if args.search:
        raise ValueError("--compare and --search exclude each other; give one.")
    with _status(console, f"compiling {args.recipe.name}, {choices[0]}") as status:
        found = compare_recipe(
            args.recipe,
            args.target,
            choices,
            args.flags,
            report=_reporter(status.update),
        )
    best = found.best()
    _write(args, found.plans[best[0]] if best else None, as_json(found))
    show_comparison(found, console)


@contextlib.contextmanager
def _status(console: Console, text: str) -> Iterator[Status]:
    """A live line in a terminal, whose text may change; else as `waiting`."""
    shown = not console.is_terminal
    with waiting(text, shown=shown), console.status(text) as status:
        yield status


def _reporter(
    say: Callable[[str], object],
) -> "Callable[[Choice | str, Plan | str], None]":
    """A callback that reports each step as it is compiled."""

    def report(choice: "Choice | str", found: "Plan | str") -> None:
        if isinstance(found, str):
            say(f"{choice}: failed: {found.splitlines()[0][:160]}")
            return
        own = found.estimate
        time = f"{own.step_seconds:.4g} s a step, " if own else ""
        fits = "fits" if found.fits else "does not fit"
        say(f"{choice}: {time}{found.memory.peak / 1e9:.1f} GB, {fits}")

    return report


def _write(args: ShowPlan, plan: "Plan | None", text: str) -> None:
    """Write the files that were named."""
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    if plan is None:
        return
    if args.png is not None or args.html is not None:
        from jaxpar.show.picture import draw  # noqa: PLC0415 - matplotlib
        from jaxpar.show.plan_page import write_html  # noqa: PLC0415

        if args.png is not None:
            draw(plan, args.png)
        if args.html is not None:
            write_html(plan, args.html, tokens=args.tokens)
