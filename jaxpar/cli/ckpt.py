"""What does ``jaxpar ckpt`` do: inspect, verify, export and import checkpoints."""

import dataclasses
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jaxpar.launch.object_stores import as_url, is_url
from jaxpar.launch.own_files import is_folder, read_json

if TYPE_CHECKING:
    from jaxpar.checkpoint.bucket import BucketStep
    from jaxpar.checkpoint.manifest import Manifest
    from jaxpar.checkpoint.places import BucketPlace, FolderPlace, FolderStep

_FOLDER = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]


@dataclasses.dataclass(frozen=True)
class List:
    """List the steps of a folder: size, metric, and whether files are unchanged.

    Attributes:
      folder: of a run, such as runs/pretrain, or of its checkpoints, also in a bucket:
        s3://bucket/run.
      verify: also compare every file's checksum, which reads all files.
    """

    folder: _FOLDER
    verify: bool = False


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show the leaves of a step, without loading them.

    Attributes:
      folder: of a run, or of its checkpoints.
      step: the step; the newest if not given.
    """

    folder: _FOLDER
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compare every file of every step with its checksum; name the damaged ones.

    Attributes:
      folder: of a run, or of its checkpoints.
      step: only this step.
    """

    folder: _FOLDER
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a step's parameters as safetensors, with one file at a time in memory.

    Attributes:
      folder: of a run, or of its checkpoints.
      out: a new folder for the files.
      step: the step; the newest valid one if not given.
      dtype: of floating leaves, fp32 or bf16.
      only: patterns of the leaves to write, or "adapters": the parameters that were
        trained, of a run with frozen ones.
      file_gb: largest size of a file, in 1e9 bytes.
    """

    folder: _FOLDER
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    step: int | None = None
    dtype: str = "fp32"
    only: tuple[str, ...] = ("params/*", "frozen/*")
    file_gb: float = 4.0


@dataclasses.dataclass(frozen=True)
class Import:
    """Make a checkpoint from safetensors: engine.restore(FOLDER, only=["params/*"]).

    Attributes:
      folder: of the new checkpoint.
      files: safetensors, or folders of them.
    """

    folder: _FOLDER
    files: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")
    ]


_Command = (
    Annotated[List, tyro.conf.subcommand("ls")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Import, tyro.conf.subcommand("import")]
)


@dataclasses.dataclass(frozen=True)
class Ckpt:
    """Inspect, verify, export and import checkpoints.

    Attributes:
      command: the subcommand.
    """

    command: Annotated[
        _Command, tyro.conf.arg(name=""), tyro.conf.OmitSubcommandPrefixes
    ]


def run_ckpt(args: Ckpt) -> None:
    """Run ``jaxpar ckpt``."""
    import jax  # noqa: PLC0415 - slow to import

    jax.config.update("jax_platforms", "cpu")  # No accelerator is needed.
    run: Callable[[Any], None] = {
        List: _list,
        Inspect: _inspect,
        Verify: _verify,
        Export: _export,
        Import: _import,
    }[type(args.command)]
    run(args.command)


def _list(args: List) -> None:
    table = Table("step", "saved", box=box.SIMPLE)
    for column in ("size, MB", "metric"):
        table.add_column(column, justify="right")
    table.add_column("files", overflow="fold")
    place = _place(args.folder)
    steps = place.steps()
    for number in sorted(steps):
        step = place.step(number)
        manifest, said = _state(step, is_whole=steps[number], verify=args.verify)
        seconds = step.saved_at()
        saved = "-"
        if seconds is not None:
            saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
        size = f"{manifest.num_bytes / 1e6:,.1f}" if manifest else "-"
        metric = manifest.metric if manifest else None
        shown = "-" if metric is None else f"{metric:.6g}"
        table.add_row(str(number), saved, size, shown, said)
    console = Console(highlight=False)
    console.print(table if steps else f"{args.folder} holds no checkpoints")


def _state(
    step: "FolderStep | BucketStep", *, is_whole: bool, verify: bool
) -> tuple["Manifest | None", str]:
    """A step's manifest, and whether its files match it."""
    if not is_whole:
        return None, "no manifest"
    try:
        if verify:
            return step.verify(), "verified now"
        manifest = step.manifest()
    except ValueError as error:
        return None, str(error)
    return manifest, step.state(manifest)


def _inspect(args: Inspect) -> None:
    place = _place(args.folder)
    newest = next(iter(place.complete()), None)
    step = newest if args.step is None else args.step
    if step is None:
        raise ValueError(f"{str(place)!r} holds no checkpoints.")
    manifest = place.step(step).manifest()
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"step {manifest.step} of run {manifest.run}")
    rows = {**manifest.versions, **manifest.meta}
    for name, value in rows.items():
        _print_value(console, name, value)
    table = Table(box=box.SIMPLE)
    for column in ("leaf", "dtype", "shape"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right")
    for name, spec in manifest.leaves.items():
        shape = "x".join(map(str, spec.shape)) or "scalar"
        table.add_row(name, spec.dtype, shape, f"{spec.num_bytes:,}")
    console.print(table)
    total = sum(spec.num_bytes for spec in manifest.leaves.values())
    many = "objects" if manifest.objects else f"{len(manifest.files)} files"
    console.print(f"{total:,} bytes in {many}")


def _print_value(console: Console, name: str, value: Any, indent: str = "") -> None:
    """Print a value of a manifest, folded to the width of the screen."""
    if isinstance(value, dict) and value:
        console.print(f"{indent}{name}", markup=False)
        for key, own in value.items():
            _print_value(console, key, own, indent + "  ")
        return
    name = f"{indent}{name:<{20 - len(indent)}} "
    options = {"width": max(console.width - len(name), 20), "break_on_hyphens": False}
    lines = textwrap.wrap(str(value), **options) or [""]
    for number, line in enumerate(lines):
        head = " " * len(name) if number else name
        console.print(f"{head}{line}", markup=False, soft_wrap=True)


def _verify(args: Verify) -> None:
    from jaxpar.checkpoint import DamagedError  # noqa: PLC0415 - imports jax

    place = _place(args.folder)
    found = place.steps()
    steps = [args.step] if args.step is not None else sorted(found)
    if not steps:
        raise ValueError(f"{str(place)!r} holds no checkpoints.")
    damaged = []
    for step in steps:
        is_whole = found.get(step, False)
        _, said = _state(place.step(step), is_whole=is_whole, verify=True)
        print(f"step {step}: {said}")
        damaged += [step] if said != "verified now" else []
    if damaged:
        raise DamagedError(f"steps {damaged} can't be restored; see above.")


def _export(args: Export) -> None:
    from jaxpar.checkpoint.exports import export  # noqa: PLC0415 - imports jax

    written = export(
        str(_place(args.folder)),
        args.out,
        step=args.step,
        dtype=args.dtype,
        only="adapters" if args.only == ("adapters",) else args.only,
        file_bytes=int(args.file_gb * 1e9),
    )
    for path in written:
        print(f"{path}  {path.stat().st_size / 1e6:,.1f} MB")


def _import(args: Import) -> None:
    from jaxpar.checkpoint.exports import (  # noqa: PLC0415 - imports jax
        import_safetensors,
    )

    names = import_safetensors(args.files, args.folder)
    print(f"{len(names)} leaves in {args.folder}, step 0; load them with")
    print(f'engine.restore({str(args.folder)!r}, only=["params/*"])')


def _place(folder: str) -> "FolderPlace | BucketPlace":
    """A folder of checkpoints, as it was given or of a run's folder."""
    from jaxpar.checkpoint.places import place_of  # noqa: PLC0415 - imports jax
    from jaxpar.training.record import FILE, checkpoints_of  # noqa: PLC0415

    if is_url(folder):
        return place_of(as_url(folder))
    path = Path(folder)
    if not is_folder(path):
        raise ValueError(f"{folder!r} is not a folder.")
    own = checkpoints_of(path, read_json(path / FILE))
    return place_of(own if is_url(own) or is_folder(Path(own)) else path)
