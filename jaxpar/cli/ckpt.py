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

from jaxpar.launch.own_files import is_folder

if TYPE_CHECKING:
    from jaxpar.checkpoint.manifest import Manifest

_FOLDER = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]


@dataclasses.dataclass(frozen=True)
class List:
    """List the steps of a folder: size, metric, and whether files are unchanged.

    Attributes:
      folder: of a run, such as runs/pretrain, or of its checkpoints.
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
    from jaxpar.checkpoint import folder as files  # noqa: PLC0415 - imports jax

    table = Table("step", "saved", box=box.SIMPLE)
    for column in ("size, MB", "metric"):
        table.add_column(column, justify="right")
    table.add_column("files", overflow="fold")
    folders = files.step_folders(_there(args.folder))
    for step, path in sorted(folders.items()):
        manifest, said = _state(path, step, verify=args.verify)
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        size = f"{manifest.num_bytes / 1e6:,.1f}" if manifest else "-"
        metric = manifest.metric if manifest else None
        shown = "-" if metric is None else f"{metric:.6g}"
        table.add_row(str(step), saved, size, shown, said)
    console = Console(highlight=False)
    console.print(table if folders else f"{args.folder} holds no checkpoints")


def _state(path: Path, step: int, *, verify: bool) -> tuple["Manifest | None", str]:
    """A step's manifest, and whether its files match it."""
    from jaxpar.checkpoint import folder as files  # noqa: PLC0415 - imports jax
    from jaxpar.checkpoint.manifest import (  # noqa: PLC0415
        read_manifest,
        sizes_differ,
    )

    if not files.is_complete(path):
        return None, "no manifest"
    try:
        manifest = read_manifest(path)
        if verify:
            return files.verified(path, step), "verified now"
    except ValueError as error:
        return None, str(error)
    if sizes_differ(path, manifest):
        return manifest, "damaged: files are missing or have another size"
    return manifest, "verified when saved, sizes unchanged"


def _inspect(args: Inspect) -> None:
    from jaxpar.checkpoint import folder as files  # noqa: PLC0415 - imports jax
    from jaxpar.checkpoint.manifest import read_manifest  # noqa: PLC0415

    folder = _there(args.folder)
    newest = next(files.complete_steps(folder), None)
    step = newest if args.step is None else args.step
    if step is None:
        raise ValueError(f"{str(folder)!r} holds no checkpoints.")
    manifest = read_manifest(files.step_path(folder, step))
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
    console.print(f"{total:,} bytes in {len(manifest.files)} files")


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
    from jaxpar.checkpoint import folder as files  # noqa: PLC0415

    folder = _there(args.folder)
    steps = [args.step] if args.step is not None else sorted(files.step_folders(folder))
    if not steps:
        raise ValueError(f"{str(folder)!r} holds no checkpoints.")
    damaged = []
    for step in steps:
        _, said = _state(files.step_path(folder, step), step, verify=True)
        print(f"step {step}: {said}")
        damaged += [step] if said != "verified now" else []
    if damaged:
        raise DamagedError(f"steps {damaged} can't be restored; see above.")


def _export(args: Export) -> None:
    from jaxpar.checkpoint.exports import export  # noqa: PLC0415 - imports jax

    written = export(
        _there(args.folder),
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


def _there(folder: Path) -> Path:
    """A folder of checkpoints, as it was given or in a run's folder."""
    if not is_folder(folder):
        raise ValueError(f"{str(folder)!r} is not a folder.")
    own = folder / "checkpoints"
    return (own if is_folder(own) else folder).absolute()
