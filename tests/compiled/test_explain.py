"""Does the report say what really lies on a device, and what crosses which axis?"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.compiled.explain import make_explanation
from jaxpar.compiled.program import read_program
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.bridge import make_network
from jaxpar.sharding.rules import compute_specs
from jaxpar.sharding.zero import shard_leaves, zero_stage
from jaxpar.step.state import make_init, state_shardings
from jaxpar.tree import named_leaves

RULES = {"up/kernel": jax.sharding.PartitionSpec(None, "tensor")}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.down = nnx.Linear(64, 17, rngs=rngs)


def explained(zero, *, data=4, tensor=2, coupled=False):
    """An explanation and the placement that it is of; the step is not compiled."""
    devices = jax.devices()[: data * tensor]
    mesh = make_mesh(MeshShape(data=data, tensor=tensor), devices)
    network = make_network(lambda rngs: Net(rngs), lambda *_: 0.0, None)
    init = make_init(network, optax.adamw(1e-3).init)
    abstract = jax.eval_shape(init, jax.random.key(0))
    leaves = named_leaves(abstract.params)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    compute = compute_specs(shapes, network.dim_names(), RULES, mesh.shape)
    stage = zero_stage(zero)
    plans = shard_leaves(leaves, compute, stage, mesh.shape)
    shardings = state_shardings(abstract, plans, stage, mesh)
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    program = read_program(compiled, mesh)
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        abstract,
        shardings,
    )
    report = make_explanation(state, plans, stage, coupled=coupled, program=program)
    return report, abstract, shardings


def bytes_on_first_device(abstract, shardings) -> dict[str, int]:
    """Place zeros as the state is placed, and count what the first device holds."""
    placed, held = named_leaves(shardings), {}
    for name, leaf in named_leaves(abstract).items():
        if name == "key":
            held[name] = jax.random.key_data(jax.random.key(0)).nbytes
            continue
        array = jax.device_put(np.zeros(leaf.shape, leaf.dtype), placed[name])
        held[name] = sum(
            shard.data.nbytes
            for shard in array.addressable_shards
            if shard.device == jax.devices()[0]
        )
    return held


@pytest.mark.parametrize("zero", [0, 3])
def test_bytes_are_those_that_a_device_holds(zero):
    report, abstract, shardings = explained(zero)
    held = bytes_on_first_device(abstract, shardings)
    assert {leaf.name: leaf.bytes_per_device for leaf in report.leaves} == held
    assert report.bytes_per_device == sum(held.values())


def test_summary_is_what_a_device_stores_and_sends():
    mesh = make_mesh(jaxpar.MeshShape(data=4), jax.devices()[:4])
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(16, 1000, rngs=rngs),
        loss_fn=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(1e-3),
        sample_batch={"x": np.zeros((8, 16), np.float32)},
        mesh=mesh,
        zero=3,
        rules={},
    )
    stored, sent = engine.explain().summary.splitlines()
    # 17,000 fp32 parameters, and a few scalars.
    assert stored == (
        "a device stores 17.0 kB of the 68.0 kB train state (ZeRO 3 on data 4)"
    )
    # A ring of four sends 3/4 of the array; backward needs no second gather here.
    assert sent == (
        "a device sends 102.0 kB a step: 51.0 kB all-gather over data, 51.0 kB "
        "reduce-scatter over data, 24 bytes all-reduce over data"
    )


def test_every_parameter_says_why_and_its_moments_rest_beside_it():
    report, *_ = explained(2)
    rows = {leaf.name: leaf for leaf in report.leaves}
    assert rows["params/up/kernel"].spec == "('data', 'tensor')"
    assert rows["params/up/kernel"].why == (
        "rule: tensor splits dim 1; zero: data splits dim 0"
    )
    for moment in ("mu", "nu"):
        assert rows[f"opt_state/0/{moment}/up/kernel"].spec == "('data', 'tensor')"
    assert rows["params/norm/scale"].why == "replicated over data: 256 B is under 1024"
    assert rows["model_state/norm/mean"].shape == (64,)


@pytest.mark.parametrize(
    ("zero", "crosses"),
    [
        (0, ["all-reduced once a step"]),
        (1, ["all-gathered once a step", "reduce-scattered once a step"]),
        (2, ["all-gathered once a step", "reduce-scattered every micro-batch"]),
        (3, ["where they are used: twice a micro-batch", "every micro-batch"]),
    ],
)
def test_what_is_meant_to_cross_is_said_by_stage(zero, crosses):
    *over_data, over_tensor = explained(zero)[0].closed_form
    assert all(x in line for x, line in zip(crosses, over_data, strict=True))
    assert over_tensor == "tensor: 1 parameters are split by rule."


def test_coupled_batch_says_that_the_compiler_reduces():
    report, *_ = explained(2, coupled=True)
    assert "examples are coupled" in report.closed_form[0]


def test_one_device_on_data_crosses_nothing():
    report, *_ = explained(2, data=1)
    assert report.closed_form[0] == "data: one device, no communication."


@pytest.fixture(scope="module")
def engine():
    return jaxpar.initialize(
        model=lambda rngs: nnx.Linear(32, 64, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch) ** 2),
        optimizer=optax.adamw(1e-3),
        sample_batch=jax.ShapeDtypeStruct((8, 32), jnp.float32),
        mesh=MeshShape(data=4, tensor=2),
        zero=1,
        rules={"kernel": jax.sharding.PartitionSpec(None, "tensor")},
        xla_options={"xla_cpu_enable_fast_math": False},
    )


def test_what_crosses_is_read_from_the_compiled_step(engine):
    program = engine.explain().program
    # The kernel, split over tensor; the bias, of 256 bytes, is reduced whole.
    kernel = 32 * 64 * 4 // 2
    assert program.communicated_bytes("all-gather", "data") == kernel
    assert program.communicated_bytes("reduce-scatter", "data") == kernel
    assert program.communicated_bytes("all-reduce", "data") >= 256
    assert program.bytes_of("batch") == 8 // 4 * 32 * 4


def test_memory_is_the_compilers(engine):
    program = engine.explain().program
    stats = engine.lower().compile().memory_analysis()
    assert program.memory.temporaries == stats.temp_size_in_bytes
    assert program.memory.arguments == stats.argument_size_in_bytes
    state, batch = program.bytes_of("state"), program.bytes_of("batch")
    assert state + batch == program.memory.arguments


def test_options_of_the_compiler_are_said(engine):
    _, setting = engine.explain().settings  # The first is of all CPU devices.
    assert (setting.option, setting.value) == ("xla_cpu_enable_fast_math", False)
    assert "xla_cpu_enable_fast_math=False: given" in engine.explain().details


def test_a_notebook_shows_the_text(engine):
    report = engine.explain()
    assert report._repr_mimebundle_() == {"text/plain": str(report)}
    assert "reduce-scatter" in str(report)


def test_json_holds_every_row():
    report, *_ = explained(3)
    read = json.loads(report.as_json())
    assert read["mesh"] == {"data": 4, "pipe": 1, "tensor": 2}
    assert read["zero"] == 3
    assert [row["name"] for row in read["leaves"]] == [x.name for x in report.leaves]


def test_text_is_a_summary_of_eight_lines_at_most(engine):
    report = engine.explain()
    lines = str(report).splitlines()
    assert len(lines) <= 8
    assert "\n".join(lines[:2]) == report.summary
    # The kernel of 32 x 64 by 4 x 2 devices, the bias whole; two moments of each.
    own = 32 * 64 * 4 // 8 + 64 * 4
    assert lines[2].startswith(
        f"stored: {own / 1e3:.1f} kB params, {2 * own / 1e3:.1f} kB opt_state, "
    )
    assert lines[2].endswith("; the model has 2,112 parameters")
    assert re.fullmatch(
        r"a step takes [\d.]+ kB of a device's memory at its peak; [\d.]+ kB are "
        "temporary",
        lines[3],
    )
    assert lines[-1] == "explain().details has a row for each leaf and each collective"


def test_text_has_what_is_to_be_noted():
    notes = ("pipe: a stage is idle.", "loss_fn: not checked.")
    report = dataclasses.replace(explained(3)[0], notes=notes)
    assert str(report).splitlines()[4:-1] == [f"- {line}" for line in notes]
    assert all(f"- {line}" in report.details for line in notes)
    program = dataclasses.replace(report.program, unknown_loops=("while.1",))
    loops = dataclasses.replace(report, program=program)
    assert "- loop while.1: trip count unknown, counted once" in str(loops)


def test_details_show_mesh_leaves_total_and_communication():
    report, *_ = explained(3)
    text = report.details
    assert "mesh data 4 x pipe 1 x tensor 2, ZeRO 3" in text
    assert "params/up/kernel" in text
    assert f"{report.bytes_per_device:,} bytes per device" in text
    assert all(line.split(",")[0] in text for line in report.closed_form)
    assert jnp.float32.dtype.name in text
