"""The largest GPT that trains on one device of a given memory, by what is offloaded.

Steps of pretrain.py (bf16, AdamW, full remat, one row), compiled for a device that need
not be here; a limit is what their peak may take. Nothing is trained. Compare: Ren et
al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021, "ZeRO-Infinity".
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar.launch.extras import import_extra
from jaxpar.planner.plan import Plan
from jaxpar.planner.recipe import plan_in_subprocess

HOST = ("--offload.optimizer", "host")
BY_HOST = ("--offload.update", "host", "--zero", "2")
DISK = ("--offload.optimizer=disk", "--offload.params=disk", "--offload.path=unused")
SETTINGS = {
    "nothing": ("--remat", "full"),
    "optimizer": (*HOST, "--remat", "full"),
    "update": (*HOST, *BY_HOST, "--remat", "full"),
    "activations": (*HOST, *BY_HOST, "--remat", "offload"),
    "parameters": (*HOST, *BY_HOST, "--offload.params=host", "--remat", "offload"),
    "to disk": (*DISK, "--zero", "2", "--remat", "offload"),
}
"""What is offloaded -> flags of pretrain.py."""

WIDTHS = (512, 1024, 2048, 2560, 4096, 5120, 6144, 8192)

READING = """\
GB. On the host: masters and moments, streamed; their update; each block's input; all
layers. To disk: all but inputs. ZeRO-Offload's paper has 13e9 parameters in 32 GB, and
1.4e9 without it; ZeRO-Infinity's 1e12 on 16 V100s."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is planned."""

    limits: tuple[float, ...] = (16, 32, 40, 80, 141)
    """GB of a device, all of which a step's peak may take."""
    target: str = "h200:1x1"
    """The device that is compiled for."""
    host: tuple[float, float] = (2_000, 30_700)
    """GB of its memory and of its disks, all for the one device: a DGX H200's."""
    seq_len: int = 1024
    """Tokens of the one row."""
    png: Path = Path("runs/largest_model/parameters.png")
    """The chart's file."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The largest model under a limit."""

    limit: float
    setting: str
    width: int
    layers: int
    plan: Plan


def shape_of(parameters: float) -> tuple[int, int]:
    """The widest GPT of some parameters with a layer for each 160 features; layers."""
    depths = {width: round(parameters / (12 * width**2)) for width in WIDTHS}
    deep = [width for width in WIDTHS if depths[width] * 160 >= width]
    width = deep[-1] if deep else WIDTHS[0]
    return width, max(1, depths[width])


def plan_of(config: Config, setting: str, width: int, layers: int) -> Plan:
    """Compile a step of a GPT whose heads have 128 features."""
    flags = ["--model=1.3b", f"--model.width={width}", f"--model.num-layers={layers}"]
    flags += [f"--model.num-heads={width // 128}", f"--model.seq-len={config.seq_len}"]
    flags += ["--precision=bf16", "--batch-size=1", "--accumulate=1", "--mesh.data=1"]
    recipe = Path(__file__).with_name("pretrain.py")
    return plan_in_subprocess(recipe, config.target, [*flags, *SETTINGS[setting]])


def largest(config: Config, setting: str, limit: float, guess: float) -> Found | None:
    """The most layers that fit; None where a single one does not."""
    tried: dict[int, Plan] = {}
    room = 1e9 * np.array([limit, *config.host])
    width, layers = shape_of(1e9 * limit / guess)
    while layers >= 1 and layers not in tried:
        tried[layers] = plan_of(config, setting, width, layers)
        left, each = room - taken(tried[layers]), bytes_of_layer(tried)
        layers += int(min(left[each > 0] // each[each > 0]))
    most = max((n for n in tried if (taken(tried[n]) <= room).all()), default=0)
    return Found(limit, setting, width, most, tried[most]) if most else None


def taken(plan: Plan) -> np.ndarray:
    """Bytes of the device, of the host's memory, and of its disks."""
    return np.array([plan.memory.peak, plan.memory.host_state, plan.host.on_disk])


def bytes_of_layer(tried: dict[int, Plan]) -> np.ndarray:
    """What a layer adds, from the last plan and the one nearest to it."""
    *before, last = tried
    other = min(before, key=lambda layers: abs(layers - last), default=0)
    return (taken(tried[last]) - (taken(tried[other]) if other else 0)) / (last - other)


def draw(found: Sequence[Found], file: Path) -> None:
    """Draw parameters over limits, a line for each setting."""
    figure = import_extra("matplotlib.figure", "--png").Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="GB of the device", ylabel="billion parameters")
    for name in SETTINGS:
        own = [x for x in found if x.setting == name]
        points = [(x.limit, x.plan.num_params / 1e9) for x in own]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.legend(title="offloaded", frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=150)


def main(config: Config) -> None:
    """Search, print the table, draw it."""
    import_extra("matplotlib.figure", "--png")  # Not after the plans are made.
    console, every = Console(highlight=False, soft_wrap=True), []
    columns = "GB", "offloaded", "parameters", "layers x width", "peak", "host", "disk"
    table = Table(*columns, box=box.SIMPLE, pad_edge=False)
    for setting in SETTINGS:
        guess = 18.0 if setting == "nothing" else 5.0
        for limit in sorted(config.limits):
            with console.status(f"compiling for {limit:g} GB, {setting} offloaded"):
                found = largest(config, setting, limit, guess)
            if found is None:
                continue
            every.append(found)
            guess = 1e9 * limit / found.plan.num_params
            sizes = [f"{own / 1e9:,.1f}" for own in taken(found.plan)]
            shape = f"{found.layers} x {found.width}"
            count = f"{found.plan.num_params / 1e9:.2f}e9"
            table.add_row(f"{limit:g}", setting, count, shape, *sizes)
    console.print(table, READING)
    draw(every, config.png)
    console.print(f"chart    {config.png.resolve()}")


if __name__ == "__main__":
    jaxpar.run_recipe(main, Config, __doc__)
