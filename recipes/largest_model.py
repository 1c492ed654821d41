"""The largest GPT that trains on one device of a given memory, by what is offloaded.

ZeRO-Offload trains 13 billion parameters where PyTorch trains 1.4 billion, on a V100 of
32 GB (Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training").
Ours are steps of pretrain.py (bf16, AdamW, full remat, one row), compiled for a device
that need not be here; a limit is what their peak may take. Nothing is trained.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar.launch.extras import import_extra
from jaxpar.planner.plan import Plan
from jaxpar.planner.recipe import plan_in_subprocess

HOST = ("--offload.optimizer", "host")
BY_HOST = ("--offload.update", "host", "--zero", "2")
SETTINGS = {
    "nothing": ("--remat", "full"),
    "optimizer": (*HOST, "--remat", "full"),
    "update": (*HOST, *BY_HOST, "--remat", "full"),
    "activations": (*HOST, *BY_HOST, "--remat", "offload"),
}
"""What is offloaded -> flags of pretrain.py."""

WIDTHS = (512, 1024, 2048, 2560, 4096, 5120, 6144, 8192)

READING = """\
One device; GB are of its memory. Nothing is set aside for the driver or fragments.
- optimizer: 12 bytes a parameter are on the host, and streamed through the device.
- update: the host computes it; gradients leave during the backward pass.
- activations: and each block's input is on the host.
ZeRO-Offload's paper has 13e9 parameters in 32 GB, and 1.4e9 without it."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is planned."""

    limits: tuple[float, ...] = (16, 32, 40, 80, 141)
    """GB of a device, all of which a step's peak may take."""
    target: str = "h200:1x1"
    """The device that is compiled for."""
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
    """The most layers that fit, of a width; None where a single one does not.

    A layer's bytes are read from two plans, and say which to compile next.
    """
    tried: dict[int, Plan] = {}
    width, layers = shape_of(1e9 * limit / guess)
    while layers >= 1 and layers not in tried:
        tried[layers] = plan_of(config, setting, width, layers)
        left = 1e9 * limit - tried[layers].memory.peak
        layers += int(left // bytes_of_layer(tried))
    fitting = [n for n, plan in tried.items() if plan.memory.peak <= 1e9 * limit]
    if not fitting:
        return None
    return Found(limit, setting, width, max(fitting), tried[max(fitting)])


def bytes_of_layer(tried: dict[int, Plan]) -> float:
    """What a layer adds to the peak, from the last plan and the one nearest to it."""
    *before, last = tried
    peak = tried[last].memory.peak
    if not before:
        return peak / last
    other = min(before, key=lambda layers: abs(layers - last))
    return (peak - tried[other].memory.peak) / (last - other)


def draw(found: Sequence[Found], file: Path) -> None:
    """Draw parameters over limits, a line for each setting."""
    figure = import_extra("matplotlib.figure", "--png").Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="GB of the device", ylabel="billion parameters")
    for name in SETTINGS:
        own = [each for each in found if each.setting == name]
        heights = [each.plan.num_params / 1e9 for each in own]
        axes.plot([each.limit for each in own], heights, marker="o", label=name)
    axes.legend(title="offloaded", frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=150)


def main(config: Config) -> None:
    """Search, print the table, draw it."""
    import_extra("matplotlib.figure", "--png")  # Not after the plans are made.
    console, every = Console(highlight=False, soft_wrap=True), []
    table = Table("GB", "offloaded", box=box.SIMPLE, pad_edge=False)
    for name in ("parameters", "layers x width", "peak, GB", "on the host, GB"):
        table.add_column(name, justify="right")
    for setting in SETTINGS:
        guess = 18.0 if setting == "nothing" else 5.0
        for limit in sorted(config.limits):
            with console.status(f"compiling for {limit:g} GB, {setting} offloaded"):
                found = largest(config, setting, limit, guess)
            if found is None:
                continue
            every.append(found)
            memory, count = found.plan.memory, found.plan.num_params
            guess = 1e9 * limit / count
            row = f"{limit:g}", setting, f"{count / 1e9:.2f}e9"
            sizes = f"{memory.peak / 1e9:.1f}", f"{memory.host_state / 1e9:.1f}"
            table.add_row(*row, f"{found.layers} x {found.width}", *sizes)
    console.print(table, READING)
    draw(every, config.png)
    console.print(f"chart    {config.png.resolve()}")


if __name__ == "__main__":
    jaxpar.run_recipe(main, Config, __doc__)
