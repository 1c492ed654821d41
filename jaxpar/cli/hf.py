"""What does ``jaxpar hf`` do: look at published models, take them in, write them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

_FOLDER = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
_OUT = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]


@dataclasses.dataclass(frozen=True)
class InspectModel:
    """Say which model a Hugging Face folder holds, and whether it can be read.

    Attributes:
      folder: with config.json and .safetensors files.
    """

    folder: _FOLDER


@dataclasses.dataclass(frozen=True)
class ImportModel:
    """Make a checkpoint of a Hugging Face folder, for ``--init-from``.

    Attributes:
      folder: with config.json and .safetensors files.
      out: the checkpoint's folder.
    """

    folder: _FOLDER
    out: _OUT


@dataclasses.dataclass(frozen=True)
class ExportModel:
    """Write a checkpoint as a Hugging Face folder that transformers loads.

    Attributes:
      run: the folder of a run, or of its checkpoints, also in a bucket.
      out: a new folder.
      like: the Hugging Face folder whose config the model has.
      step: of the checkpoint; the newest if not given.
      dtype: of the tensors.
      lora_alpha: of a run with adapters, which are merged.
      rank_stabilised: whether its adapters are scaled by the root of their rank.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    out: _OUT
    like: Path
    step: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora_alpha: float | None = None
    rank_stabilised: bool = False


_Command = (
    Annotated[InspectModel, tyro.conf.subcommand("inspect")]
    | Annotated[ImportModel, tyro.conf.subcommand("import")]
    | Annotated[ExportModel, tyro.conf.subcommand("export")]
)


@dataclasses.dataclass(frozen=True)
class Hf:
    """Models of Hugging Face: inspect, import, export.

    Attributes:
      command: the subcommand.
    """

    command: Annotated[
        _Command, tyro.conf.arg(name=""), tyro.conf.OmitSubcommandPrefixes
    ]


def run_hf(args: Hf) -> None:
    """Run ``jaxpar hf``."""
    import jax  # noqa: PLC0415 - slow to import

    jax.config.update("jax_platforms", "cpu")  # No accelerator is needed.
    run: dict[type, Callable[[Any], None]] = {
        InspectModel: _inspect,
        ImportModel: _import,
        ExportModel: _export,
    }
    run[type(args.command)](args.command)


def _inspect(args: InspectModel) -> None:
    from jaxpar.models.hf.pretrained import (  # noqa: PLC0415 - imports jax
        from_huggingface,
    )

    ours = from_huggingface(args.folder)
    missing = ours.check()
    table = Table(box=None, show_header=False)
    for field in dataclasses.fields(ours.config):
        value = getattr(ours.config, field.name)
        if value != field.default:
            table.add_row(field.name, str(value))
    console = Console(highlight=False)
    console.print(f"{args.folder}: {ours.hf['model_type']}", soft_wrap=True)
    console.print(table)
    console.print(f"{ours.num_params:,} parameters; every tensor has its leaf")
    if missing:
        console.print(f"not in the folder, and drawn anew: {', '.join(missing)}")


def _import(args: ImportModel) -> None:
    import jax.numpy as jnp  # noqa: PLC0415 - slow to import

    from jaxpar.checkpoint.exports import under_params  # noqa: PLC0415 - imports jax
    from jaxpar.checkpoint.store import Checkpoints  # noqa: PLC0415
    from jaxpar.models.hf.pretrained import from_huggingface  # noqa: PLC0415

    found = from_huggingface(args.folder).read()
    leaves = {name.replace("/", "."): jnp.asarray(x) for name, x in found.items()}
    checkpoints = Checkpoints(args.out)
    checkpoints.save(0, under_params(leaves), meta={"imported": [args.folder.name]})
    checkpoints.close()
    print(f"{args.out}: step 0, {len(found)} leaves; begin with it by --init-from")


def _export(args: ExportModel) -> None:
    from jaxpar.checkpoint.places import place_of  # noqa: PLC0415 - imports jax
    from jaxpar.models.hf.adapters import merged  # noqa: PLC0415
    from jaxpar.models.hf.pretrained import from_huggingface  # noqa: PLC0415
    from jaxpar.models.hf.writing import write_folder  # noqa: PLC0415
    from jaxpar.models.lora import LoraConfig  # noqa: PLC0415
    from jaxpar.training.origin import find_parameters  # noqa: PLC0415

    place = place_of(find_parameters(args.run))
    number = place.choose(args.step, {})["step"]
    stored = place.step(number)
    manifest = stored.manifest()
    params = [n for n in manifest.leaves if n.startswith(("params/", "frozen/"))]
    ours = from_huggingface(args.like)
    full = {name.partition("/")[2]: name for name in params}

    def read(name: str) -> np.ndarray:
        return stored.read_whole(full[name], manifest)

    factors = [name for name in full if name.endswith("/adapter/a")]
    if factors and args.lora_alpha is None:
        raise ValueError(
            f"lora_alpha: {args.run} has adapters, which are merged into the kernels; "
            "give --lora-alpha as the run had it."
        )
    rank = read(factors[0]).shape[-1] if factors else 0
    alpha, stable = args.lora_alpha or 1.0, args.rank_stabilised
    lora = LoraConfig(rank=rank, alpha=alpha, rank_stabilised=stable)
    arrays = merged(list(full), read, lora.scale)
    write_folder(arrays, ours.leaves(), ours.hf, args.out, dtype=args.dtype)
    print(f"{args.out}: {len(params)} leaves of step {number}")
