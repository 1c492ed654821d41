"""Is an error of one device found by a replay, and the device named?

And only errors: on CPUs a step and its replays are equal to the bit.
"""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.optim import diloco, fused_adamw
from tests.equivalence import cut_batches, several_losses
from tests.equivalence.perceptron import batches, make_engine, make_piped_engine
from tests.optim.numpy_adam import NumpyAdam
from tests.runs import Data, bits, fresh
from tests.wrong_devices import Change, faulty_result, faulty_rows, flip, scale

ADAMW = optax.adamw(1e-2)
KERNEL = "params/embed/embedding"
pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning",
    "ignore:.*no rule splits a parameter.*",
)


def replayed(engine: jaxpar.Engine, batch: Any, **loss: Any) -> Any:
    """Take a step, and compare it with its replay."""
    replays = engine.replays()
    replays.begin(batch, **loss)
    metrics = engine.step(batch, **loss)
    replays.check(metrics)
    return metrics


@pytest.fixture
def engine() -> Any:
    """Of ZeRO 2 on data 4 x tensor 2; its programs are compiled once for all tests."""
    made = fresh()
    yield made
    made.replays().tolerance = 0.0


def why(engine: jaxpar.Engine, *faults: Any) -> str:
    """What is said of a step with these faults."""
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        with pytest.raises(jaxpar.CorruptionError) as found:
            replayed(engine, next(Data()))
    return str(found.value)


def test_steps_with_replays_are_those_without_and_equal_to_the_bit(engine: Any) -> None:
    found = []
    for step in (engine.step, lambda batch: replayed(engine, batch)):
        fresh()
        data = Data()
        losses = [float(step(next(data))["loss"]) for _ in range(3)]
        found.append((losses, bits(engine)))
    assert found[0] == found[1]


@pytest.mark.parametrize("device", range(8))
def test_device_with_a_wrong_bit_in_its_result_is_named(
    engine: Any, device: int
) -> None:
    rng = np.random.default_rng(device)
    leaf = str(rng.choice([KERNEL, "opt_state/0/mu/out/kernel", "params/out/bias"]))
    said = why(engine, faulty_result(engine, 0, leaf, device))
    assert f"By the vote of 3 runs device {device} (" in said
    other = (device - 1) % 8  # Which has its place in the replay.
    shard = rf"{leaf}\[[0-9:, ]+\] by device {device} \(.*\) and device {other} \("
    assert re.search(shard, said), said


def test_slice_that_differs_is_named(engine: Any) -> None:
    said = why(engine, faulty_result(engine, 0, KERNEL, 3))
    leaf = engine.state.params["embed"]["embedding"]
    index = next(s.index for s in leaf.addressable_shards if s.device.id == 3)
    ends = [own.indices(size) for own, size in zip(index, leaf.shape, strict=True)]
    assert f"{KERNEL}[{', '.join(f'{a}:{b}' for a, b, _ in ends)}] by" in said


@pytest.mark.parametrize("run", [1, 2])
def test_device_that_is_wrong_in_a_replay_is_named(engine: Any, run: int) -> None:
    # The second replay is taken where the first one differs.
    faults = [faulty_result(engine, each, KERNEL, 5) for each in range(1, run + 1)]
    assert "By the vote of 3 runs device 5 (" in why(engine, *faults)


def test_device_that_is_wrong_in_every_run_is_named(engine: Any) -> None:
    faults = [faulty_result(engine, run, KERNEL, 6) for run in range(3)]
    assert "By the vote of 3 runs device 6 (" in why(engine, *faults)


def test_error_that_collectives_spread_is_found_and_no_device_is_blamed(
    engine: Any,
) -> None:
    fault = faulty_rows(engine, 0, "boost", 2, scale(1.5))
    assert "not known (collectives have spread the error, and both" in why(
        engine, fault
    )


def test_wrong_metric_is_found(engine: Any) -> None:
    replays, batch = engine.replays(), next(Data())
    replays.begin(batch)
    metrics = engine.step(batch)
    with pytest.raises(jaxpar.CorruptionError, match="metrics/loss by device 0"):
        replays.check({**metrics, "loss": metrics["loss"] * 2})


def test_memory_is_that_of_a_second_state(engine: Any) -> None:
    def live() -> int:
        return sum(x.nbytes for x in jax.live_arrays())

    batch = next(Data())
    replayed(engine, batch)
    state = sum(x.nbytes for x in jax.tree.leaves(engine._leaves))
    rows = sum(x.nbytes for x in jax.tree.leaves(batch))
    before = live()
    engine.replays().begin(batch)
    assert 0.9 * state < live() - before < 1.1 * state + 2 * rows
    engine.replays().check(engine.step(batch))
    assert live() - before < 0.1 * state


def test_check_without_a_beginning_is_refused(engine: Any) -> None:
    with pytest.raises(RuntimeError, match=r"check: call begin\(batch\)"):
        engine.replays().check(engine.step(next(Data())))


def noisy(engine: Any, run: int, change: Change) -> Any:
    return faulty_result(engine, run, KERNEL, 4, change)


def test_rounding_is_measured_at_the_start_and_borne(engine: Any) -> None:
    """As on devices whose sums may be in another order."""
    replays = engine.replays()
    replays.tolerance, data = None, Data()
    with noisy(engine, 1, scale(1 + 1e-5)):
        replayed(engine, next(data))
    assert replays.tolerance == pytest.approx(8e-5, rel=0.05)
    with noisy(engine, 0, scale(1 + 5e-5)):
        replayed(engine, next(data))
    said = why(engine, noisy(engine, 0, scale(1.001)))
    assert "By the vote of 3 runs device 4 (" in said


def test_equal_bits_at_the_start_are_asked_for_later(engine: Any) -> None:
    replays = engine.replays()
    replays.tolerance = None
    replayed(engine, next(Data()))
    assert replays.tolerance == 0
    why(engine, noisy(engine, 0, flip))


def test_more_than_rounding_at_the_start_is_an_error(engine: Any) -> None:
    engine.replays().tolerance = None
    said = why(engine, noisy(engine, 2, scale(1.1)))
    assert "at the start the step and its replay" in said
    assert "By the vote of 3 runs device 4 (" in said
    assert "and rounding by 0.01 at most" in said


def test_one_device_is_refused() -> None:
    engine = make_engine(ADAMW, 1, 1, 0)
    with pytest.raises(ValueError, match="replays: the mesh has one device"):
        engine.replays()


def test_update_by_the_host_is_refused() -> None:
    engine = make_engine(NumpyAdam(1e-2), 4, 2, 1)
    with pytest.raises(ValueError, match="the host computes the update"):
        engine.replays()


@pytest.mark.thorough
def test_of_two_devices_both_are_named() -> None:
    engine = make_engine(ADAMW, 2, 1, 3)
    fault = faulty_result(engine, 0, "params/up/kernel", 1)
    with fault, pytest.raises(jaxpar.CorruptionError) as found:
        replayed(engine, batches()[0])
    said = str(found.value)
    assert "two devices have no third one" in said
    assert re.search(r"params/up/kernel[^;]* by device 1 \(.*\) and device 0 \(", said)


TENSOR = {"blocks/up/kernel": jax.P(None, None, "tensor")}
PIPED = jaxpar.MeshShape(data=2, pipe=2, tensor=2)
OFFLOAD = jaxpar.Offload(optimizer="host", piece_mb=0.0002)


def piped(**options: Any) -> jaxpar.Engine:
    return make_piped_engine(ADAMW, rules=TENSOR, **{"mesh": PIPED, **options})


def replicas(zero: int) -> jaxpar.Engine:
    """Local SGD: each replica has parameters of its own."""
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(replica=2, data=2, tensor=2))
    own = diloco(optax.adamw(1e-2), replicas=2, every=2)
    return make_piped_engine(own, mesh=mesh, zero=zero, accumulate=2)


CASES: dict[str, Any] = {
    **{f"zero {z}": lambda z=z: make_engine(ADAMW, 4, 2, z) for z in range(4)},
    **{
        f"zero {z}, accumulated and clipped": lambda z=z: make_engine(
            ADAMW, 8, 1, z, accumulate=2, clip_norm=0.1
        )
        for z in range(4)
    },
    **{f"pipe, tensor, zero {z}": lambda z=z: piped(zero=z) for z in range(4)},
    "zero bubble": lambda: piped(schedule="zero_bubble"),
    "asynchronous": lambda: piped(schedule="pipedream_2bw"),
    "synchronous at first": lambda: piped(schedule="pipemare:2"),
    "local SGD": lambda: replicas(1),
    "fp16": lambda: make_engine(ADAMW, 4, 2, 2, precision="fp16"),
    "bf16": lambda: make_engine(ADAMW, 4, 2, 3, precision="bf16"),
    "fused": lambda: make_engine(fused_adamw(1e-2), 4, 2, 2),
    "8-bit moments": lambda: make_engine(fused_adamw(1e-2, bits=8), 4, 2, 2),
    "average": lambda: make_engine(ADAMW, 4, 2, 1, carried=[jaxpar.Ema(0.9)]),
    "state on the host": lambda: make_engine(ADAMW, 4, 2, 2, offload=OFFLOAD),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_technique_is_replayed_to_the_bit_and_its_faults_are_found(name: str) -> None:
    engine = CASES[name]()
    for batch in batches()[:4]:
        replayed(engine, batch)
    named = jaxpar.tree.named_leaves(engine.placement.packed_shardings)
    leaf = next(own for own in named if own.startswith("params/"))
    fault = faulty_result(engine, 0, leaf, 3)
    with fault, pytest.raises(jaxpar.CorruptionError) as found:
        replayed(engine, batches()[4])
    assert "By the vote of 3 runs device 3 (" in str(found.value)


@pytest.mark.thorough
def test_batches_of_other_shapes_are_replayed() -> None:
    shapes = cut_batches.SHAPES[1:]
    engine = cut_batches.make_engine({"data": 4}, shapes, zero=2)
    for shape in shapes:
        replayed(engine, cut_batches.batch_of(*shape))


@pytest.mark.thorough
def test_each_of_several_losses_is_replayed() -> None:
    shape = jaxpar.MeshShape(data=4, tensor=2)
    engine = several_losses.make_engine("adversarial", shape, 3)
    for batch in several_losses.batches():
        for loss in ("disc", "gen"):
            replayed(engine, batch, loss=loss)
    with pytest.raises(ValueError, match="loss: this engine has 2 losses"):
        engine.replays().begin(several_losses.batches()[0])


@pytest.mark.thorough
def test_restored_state_is_replayed(tmp_path: Path) -> None:
    engine = make_engine(ADAMW, 4, 2, 3)
    replayed(engine, batches()[0])
    engine.save(tmp_path)
    engine.wait()
    engine.restore(tmp_path)
    replayed(engine, batches()[1])
    assert engine.steps == 2
