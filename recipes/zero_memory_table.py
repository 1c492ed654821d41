"""The exercise every ZeRO course sets: DeepSpeed's table of model states, and ours.

DeepSpeed's bytes are closed forms (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", figure 1 and section 7). Ours are read from
the training step of pretrain.py, in bf16 with one micro-batch, compiled at each stage
for devices that need not be here. Nothing is trained, so there is no `build`.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.hlo import ArrayType
from jaxpar.launch.extras import import_extra
from jaxpar.mesh import DATA
from jaxpar.planner.plan import Plan
from jaxpar.planner.recipe import plan_in_subprocess

DEEPSPEEDS_ELEMENTS = (2, 2, 2, 3)
"""Elements communicated in a step for each parameter, by ZeRO stage."""

READING = """\
GB on one device. DeepSpeed's are 16 Psi, 4 Psi + 12 Psi/N, 2 Psi + 14 Psi/N and
16 Psi/N bytes: 120 / 31.4 / 16.6 / 1.88 of 7.5e9 on 64; here {psi:.4g} on {devices}.
- masters, Adam: arguments of the compiled step; 4 and 8 bytes a parameter.
- copies: parameters held in bf16 through the step, by closed form. Stage 3 gathers
  each where it is used: those, and its shards in bf16 (2 Psi/N), are in the peak alone.
- grads: whole at 0 and 1, shards at 2 and 3; bf16, as sent, for one micro-batch
  needs no sum (sums of several are fp32, 4 bytes for 2).
- peak: all that is alive at the worst moment, with activations and XLA's own.
- sent: elements over data in a step, by Psi (DeepSpeed's)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is planned."""

    model: str = "7.5b"
    """A preset: tiny, 124m, 350m, 1.3b, 7b, or a row of Megatron's table."""
    target: str = "h200:8x8"
    """Devices: a100, h100, h200 or b200:HOSTSxGPUS; TPUs such as v5e:4x4; cpu:N."""
    batch_size: int = 64
    """Rows of the global batch; of what is listed, only the peak grows with them."""
    png: Path = Path("runs/zero_memory_table/model_states.png")
    """The chart's file."""


def deepspeed_bytes(psi: float, devices: int) -> tuple[float, ...]:
    """DeepSpeed's model states on one device, at stages 0 to 3."""
    split = psi / devices
    return 16 * psi, 4 * psi + 12 * split, 2 * psi + 14 * split, 16 * split


def model_states(plan: Plan) -> dict[str, int]:
    """Our bytes of model states on one device, by kind."""
    memory = plan.memory
    return {
        "masters": memory.parameters,
        "Adam": memory.optimizer,
        "copies": memory.copies,
        "grads": memory.gradients,
    }


def elements_communicated(rows: Iterable[Collective]) -> float:
    """Elements over the data axis in a step; an all-reduce scatters, then gathers."""
    return sum(
        (1 + (row.kind == "all-reduce")) * row.bytes / ArrayType(row.dtype, (1,)).bytes
        for row in rows
        if row.axes == (DATA,)
    )


def make_plans(config: Config, console: Console) -> list[Plan]:
    """Compile the four stages, each in a process of its own."""
    recipe, plans = Path(__file__).with_name("pretrain.py"), []
    flags = ["--model", config.model, "--batch-size", str(config.batch_size)]
    flags += ["--precision", "bf16", "--remat", "full", "--accumulate", "1", "--zero"]
    for stage in "0123":
        with console.status(f"compiling stage {stage} for {config.target}"):
            plans.append(plan_in_subprocess(recipe, config.target, [*flags, stage]))
    return plans


def make_table(plans: Sequence[Plan], theirs: Sequence[float]) -> Table:
    """Lay both systems' numbers side by side."""
    table = Table("ZeRO", box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for name in ("DeepSpeed", "ours", *model_states(plans[0]), "peak", "sent"):
        table.add_column(name, justify="right")
    for plan in plans:
        own = model_states(plan)
        numbers = (theirs[plan.zero], sum(own.values()), *own.values())
        in_gb = [f"{n / 1e9:.3g}" for n in (*numbers, plan.memory.peak)]
        sent = elements_communicated(plan.program.collectives) / plan.num_params
        both = f"{sent:.2f} ({DEEPSPEEDS_ELEMENTS[plan.zero]})"
        table.add_row(str(plan.zero), *in_gb, both)
    return table


def draw(plans: Sequence[Plan], theirs: Sequence[float], file: Path) -> None:
    """Draw bars by stage: DeepSpeed's, and ours stacked by kind."""
    figures = import_extra("matplotlib.figure", "--png")
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes, stages, below = figure.add_subplot(), range(4), [0.0] * 4
    left, right = ([stage + side for stage in stages] for side in (-0.2, 0.2))
    heights = [number / 1e9 for number in theirs]
    bars = axes.bar(left, heights, 0.38, color="0.7", label="DeepSpeed's")
    axes.bar_label(bars, fmt="%.1f")
    for kind in model_states(plans[0]):
        heights = [model_states(plan)[kind] / 1e9 for plan in plans]
        bars = axes.bar(right, heights, 0.38, bottom=below, label=f"ours: {kind}")
        below = [sum(pair) for pair in zip(below, heights, strict=True)]
    axes.bar_label(bars, [f"{height:.1f}" for height in below])
    axes.set_xticks(stages, [f"ZeRO {stage}" for stage in stages])
    axes.set(ylabel="GB of model states", title=f"One device of {plans[0].target}")
    axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=150)


def main(config: Config) -> None:
    """Plan the stages, print the table, draw it."""
    import_extra("matplotlib.figure", "--png")  # Not after the plans are made.
    console = Console(highlight=False, soft_wrap=True)
    plans = make_plans(config, console)
    psi, devices = plans[0].num_params, plans[0].num_devices
    theirs = deepspeed_bytes(psi, devices)
    console.print(make_table(plans, theirs))
    console.print(READING.format(psi=psi, devices=devices))
    for plan in plans:
        over = sum(model_states(plan).values()) - theirs[plan.zero]
        if over > 2e-3 * theirs[plan.zero]:
            by = f"{over / 1e9:.2g} GB, which is {over / psi * devices:.2g} Psi/N"
            console.print(f"Stage {plan.zero} is above DeepSpeed's by {by}.")
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        console.print(f"note     {note}")
    draw(plans, theirs, config.png)
    console.print(f"chart    {config.png.resolve()}")


if __name__ == "__main__":
    jaxpar.run_recipe(main, Config, __doc__)
