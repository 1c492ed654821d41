"""How long is it until the first step is done: cold, and from jax's persistent cache?

Each time is a process of its own, from `jaxpar.initialize` to the end of the first
step; imports are measured apart. Cold runs begin with an empty cache, which the warm
runs behind them find filled. The check of the loss function before the first step is
in these times; a third process, cold, does without it.

Then a transformer in plain Flax NNX, its equal layers in a loop and scanned, by jaxpar
on all devices and by NNX alone on one (`benchmarks.contestants.deep`), cold, in turns.
On a shared machine the seconds of the CPU are the steadier ones.

    python benchmarks/compile_time.py
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FORMS = ("loop", "scan")
UNITS = ("seconds", "cpu_seconds", "init_seconds", "init_cpu_seconds")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile, and how often."""

    layers: int = 12
    """Of a GPT of width 256."""
    devices: int = 4
    """CPU devices, on data."""
    zero: int = 3
    """ZeRO stage."""
    rounds: int = 3
    """Pairs of a cold and a warm process; the median counts."""
    check_loss: bool = True
    """Whether the loss function is checked."""
    depths: tuple[int, ...] = (24, 96)
    """Layers of the transformer in plain NNX; () to leave it out."""
    cache: str = ""
    """Internal: the cache of one process, which then measures itself."""


def measure_one(config: Config) -> None:
    """Take the first step with a given cache, and print the seconds it took."""
    began = time.perf_counter()
    import jax  # noqa: PLC0415 - what importing takes is measured
    import jax.numpy as jnp  # noqa: PLC0415
    import optax  # noqa: PLC0415

    import jaxpar  # noqa: PLC0415
    from jaxpar.models import DecoderConfig, decoder_loss, make_decoder  # noqa: PLC0415

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.devices)
    jax.config.update("jax_compilation_cache_dir", config.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.devices()
    imported = time.perf_counter()
    model = DecoderConfig(num_layers=config.layers, num_heads=4, width=256, seq_len=128)
    batch = {"tokens": jnp.zeros((config.devices, 129), jnp.int32)}
    engine = jaxpar.initialize(
        model=make_decoder(model),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch=batch,
        zero=config.zero,
        check_loss=config.check_loss,
    )
    loss = float(engine.step(batch)["loss"])
    first_step = time.perf_counter() - imported
    print(json.dumps([imported - began, first_step, loss]))


def measured(config: Config, cache: str) -> list[float]:
    """Seconds of importing and to the first step, and the loss, of a process."""
    command = [sys.executable, __file__, "--cache", cache]
    for name in ("layers", "devices", "zero"):
        command += [f"--{name}", str(getattr(config, name))]
    command.append("--check-loss" if config.check_loss else "--no-check-loss")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured_deep(config: Config, layers: int, form: str, who: str) -> list[float]:
    """Wall and CPU seconds to the first step, and those of initialising alone."""
    script = Path(__file__).parent / "contestants" / "deep.py"
    asked = layers, form, who, config.devices, 1
    command = [sys.executable, str(script), *map(str, asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    init, init_cpu, step, step_cpu = json.loads(done.stdout.splitlines()[-1])
    return [init + step, init_cpu + step_cpu, init, init_cpu]


def compare_deep(config: Config) -> dict[str, float]:
    """Medians of jaxpar and of plain NNX by depth, and their ratios."""
    found: dict[str, float] = {}
    for layers in config.depths:
        kinds = [(form, who) for form in FORMS for who in ("plain", "jaxpar")]
        runs: dict[tuple[str, str], list[list[float]]] = {kind: [] for kind in kinds}
        for _ in range(config.rounds):
            for kind in kinds:
                runs[kind].append(measured_deep(config, layers, *kind))
        for form, who in kinds:
            columns = zip(*runs[form, who], strict=True)
            medians = dict(zip(UNITS, map(statistics.median, columns), strict=True))
            name = f"{who}_{layers}_layers_{form}"
            found |= {f"{name}_{unit}": seconds for unit, seconds in medians.items()}
            shown = ", ".join(f"{x:.1f} {unit}" for unit, x in medians.items())
            print(f"{name}: {shown}")
        for form in FORMS:
            for unit in UNITS[:2]:
                ours, plain = (
                    found[f"{who}_{layers}_layers_{form}_{unit}"]
                    for who in ("jaxpar", "plain")
                )
                found[f"{layers}_layers_{form}_{unit}_over_plain"] = ours / plain
                print(f"{layers} layers, {form}, {unit}: {ours / plain:.2f} x plain")
    return found


def main(config: Config) -> None:
    """Measure pairs of processes and write the medians."""
    if config.cache:
        measure_one(config)
        return
    from benchmarks.record import write_result  # noqa: PLC0415 - imports jax

    cold, warm, imports, unchecked = [], [], [], []
    for number in range(config.rounds):
        with tempfile.TemporaryDirectory() as cache:
            first, second = measured(config, cache), measured(config, cache)
        with tempfile.TemporaryDirectory() as cache:
            plain = dataclasses.replace(config, check_loss=False)
            unchecked.append(measured(plain, cache)[1])
        assert first[2] == second[2], f"losses differ: {first[2]} and {second[2]}"
        cold.append(first[1])
        warm.append(second[1])
        imports += [first[0], second[0]]
        print(
            f"round {number}: cold {first[1]:.2f} s, warm {second[1]:.2f} s, "
            f"cold without the check {unchecked[-1]:.2f} s"
        )
    medians = {
        "first_step_cold_seconds": statistics.median(cold),
        "first_step_warm_seconds": statistics.median(warm),
        "first_step_cold_unchecked_seconds": statistics.median(unchecked),
        "imports_seconds": statistics.median(imports),
    }
    share = medians["first_step_warm_seconds"] / medians["first_step_cold_seconds"]
    print(f"warm is {share:.2f} of cold (mark: a third)")
    medians |= {"warm_over_cold": share, **compare_deep(config)}
    path = write_result("compile_time", medians)
    print(f"written: {path.name}")


if __name__ == "__main__":
    from jaxpar.cli.recipe_flags import parse

    main(parse(Config, __doc__))
