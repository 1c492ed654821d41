"""Is a step that holds or moves more than its budget told what does it?"""

import dataclasses
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.compiled.budget import Budget, check, record
from jaxpar.compiled.explain import LeafReport
from jaxpar.compiled.measured import Measured
from jaxpar.compiled.source_lines import Operation
from jaxpar.engine.placement import Placement
from jaxpar.step.state import state_shardings
from tests.model.toys import make_engine as make_pipelined
from tests.model.toys import make_mesh, make_model

ROWS, IN, MIDDLE = 512, 128, 256
KERNELS = 2 * IN * MIDDLE * 4
MB = 1_000_000


def gather(number: int, axes: tuple[str, ...] = ("data",), **change) -> Operation:
    right = {
        "kind": "all-gather",
        "shape": f"f32[{number // 4}]",
        "num_arrays": 1,
        "times": 1,
        "name": "dot",
        "line": "model.py:7",
    }
    return Operation(axes=axes, bytes=number, **(right | change))


def leaf(name: str, held: int, **change) -> LeafReport:
    right = {"shape": (64,), "dtype": "float32", "spec": "('data',)", "why": ""}
    return LeafReport(name=name, bytes_per_device=held, bytes=0, **(right | change))


def measured(*operations: Operation, **change) -> Measured:
    right = {
        "mesh": {"data": 4, "pipe": 1, "tensor": 2},
        "leaves": (leaf("params/w", 32),),
        "peak_bytes": 1000,
        "on_cpu": False,
    }
    return Measured(operations=operations, **(right | change))


def allowed(communicated: dict | None = None, **change) -> Budget:
    return Budget(**({"state_bytes": 32, "communicated": communicated or {}} | change))


def test_json_is_read_as_it_was_written():
    budget = Budget(7, {"data x tensor": {"all-gather": 8}}, 9, 0.1, 3, ("pipe",))
    assert Budget.from_json(budget.as_json()) == budget
    assert json.loads(budget.as_json())["communicated"] == budget.communicated
    short = Budget.from_json('{"state_bytes": 7, "crossing": {}}')  # The former name.
    assert short == Budget(7, {})


def test_json_of_something_else_is_refused():
    with pytest.raises(
        ValueError,
        match=r"budget: the JSON object has no \['communicated'\] and unknown "
        r"\['crosing'\]; its keys are state_bytes, communicated, .* Budget.as_json",
    ):
        Budget.from_json('{"state_bytes": 7, "crosing": {}}')


@pytest.mark.parametrize(
    ("budget", "number", "exceeds"),
    [
        (allowed({"data": {"all-gather": 10 * MB}}), 10.49 * MB, False),
        (allowed({"data": {"all-gather": 10 * MB}}), 10.51 * MB, True),
        (allowed({"data": {"all-gather": 10 * MB}}, tolerance=0.5), 14.9 * MB, False),
        (allowed({"data": {"all-gather": 1000}}), 66_000, False),
        (allowed({"data": {"all-gather": 1000}}), 67_000, True),
        (allowed(), 65_536, False),
        (allowed(), 65_540, True),
        (allowed(small_bytes=2 * MB), MB, False),
        (allowed({"data": {"all-reduce": MB}}), MB, True),
        (allowed({"tensor": {"all-gather": MB}}), MB, True),
        (allowed(unbounded=("data",)), MB, False),
        (allowed(unbounded=("tensor",)), MB, True),
    ],
)
def test_bytes_over_an_axis_are_held_to_what_is_named(budget, number, exceeds):
    assert bool(check(budget, measured(gather(int(number))))) == exceeds


def test_several_axes_are_unbounded_where_all_of_them_are():
    step = measured(gather(MB, axes=("data", "tensor")))
    assert check(allowed(unbounded=("tensor",)), step)
    assert not check(allowed(unbounded=("tensor", "data")), step)
    assert not check(allowed({"data x tensor": {"all-gather": MB}}), step)


def test_what_spans_no_axis_does_not_cross():
    assert not check(allowed(), measured(gather(MB, axes=())))


def test_operations_that_move_most_are_named_alike_ones_together():
    ops = [gather(MB, line="a.py:1", times=2), gather(MB, line="a.py:1", times=3)]
    ops += [gather(1000 - i, line=f"b.py:{i}") for i in range(6)]
    (said,) = check(allowed({"data": {"all-gather": MB}}), measured(*ops))
    first, *lines = said.splitlines()
    assert first == (
        "data: all-gather moves 2,005,985 bytes a step, but the budget is 1,000,000 "
        "(2.0 times as much)."
    )
    assert lines[0] == (
        "  - 2,000,000 bytes: 5 x all-gather of f32[250000], dot at a.py:1"
    )
    assert lines[1].endswith("b.py:0")
    assert lines[5] == "  - and 2 smaller ones"
    assert "jaxpar.constrain(x, " in lines[6]


def test_collective_that_is_not_named_is_said_to_be_so():
    step = measured(gather(MB, kind="all-to-all"))
    (said,) = check(allowed({"data": {"all-gather": MB}}), step)
    assert "data: all-to-all moves 1,000,000 bytes a step, which the budget" in said
    assert "does not name" in said


@pytest.mark.parametrize(
    ("budget", "on_cpu", "exceeds"),
    [
        ({"reduce-scatter": MB}, False, True),
        ({"reduce-scatter": MB}, True, False),
        ({"reduction": MB}, False, False),
        ({"reduction": MB // 2, "all-reduce": MB // 2}, False, False),
        ({"reduction": MB // 2}, False, True),
        ({}, True, True),
    ],
)
def test_all_reduce_stands_for_a_reduce_scatter_on_cpus_and_where_said(
    budget, on_cpu, exceeds
):
    step = measured(gather(MB, kind="all-reduce"), on_cpu=on_cpu)
    said = check(allowed({"data": budget}), step)
    assert bool(said) == exceeds
    if exceeds and on_cpu:
        assert "data: all-reduce and reduce-scatter moves" in said[0]
        assert "1 x all-reduce of" in said[0]


def test_leaf_that_rests_larger_than_its_share_is_named_with_its_reason():
    why = "replicated over data: 4 divides no dim"
    leaves = (
        leaf("params/a/w", 32),
        leaf("params/b/w", 256, spec="(None,)", why=why),
        leaf("opt_state/0/mu/b/w", 256, spec="(None,)"),
    )
    (said,) = check(allowed(state_bytes=96), measured(leaves=leaves))
    assert said.splitlines()[:3] == [
        "state: 544 bytes per device, but the budget is 96.",
        "  - params/b/w (float32[64]) is stored as (None,): 256 bytes, 32 if "
        f"sharded over all 8 devices ({why})",
        "  - opt_state/0/mu/b/w (float32[64]) is stored as (None,): 256 bytes, 32 "
        f"if sharded over all 8 devices ({why})",
    ]
    assert "params/a/w" not in said
    assert not check(allowed(state_bytes=519), measured(leaves=leaves))


def test_state_that_grew_though_all_of_it_is_spread_is_said_to_be_so():
    (said,) = check(allowed(state_bytes=30), measured())
    assert "every leaf is sharded over all devices: the state itself is larger" in said


def test_peak_is_held_where_one_is_given():
    assert not check(allowed(), measured())
    assert not check(allowed(peak_bytes=960), measured())
    (said,) = check(allowed(peak_bytes=950), measured())
    assert "peak: 1,000 bytes per device, but the budget is 950." in said


def test_record_leaves_out_what_is_small():
    params = leaf("params/w", 8, shape=(100 * MB,))
    step = measured(
        gather(3 * MB),
        gather(MB, kind="all-reduce"),
        gather(300_000, axes=("data", "tensor")),
        gather(2 * MB, axes=("tensor",)),
        leaves=(params, leaf("key", 8, shape=(), dtype="key<fry>")),
    )
    assert record(step) == Budget(
        state_bytes=16,
        communicated={
            "data": {"all-gather": 3 * MB, "all-reduce": MB},
            "tensor": {"all-gather": 2 * MB},
        },
        peak_bytes=1000,
        small_bytes=400_000,
        at_least={"data": {"reduction": MB}},
    )
    assert not check(record(step), step)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(IN, MIDDLE, rngs=rngs)
        self.down = nnx.Linear(MIDDLE, IN, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def squared(model, batch):
    return jnp.mean((model(batch) - batch) ** 2)


def planted(model, batch):
    """An activation that every device is given whole."""
    hidden = jnp.tanh(model.up(batch))
    hidden = jaxpar.constrain(hidden, None, None)
    return jnp.mean((model.down(hidden) - batch) ** 2)


def make_engine(**change) -> jaxpar.Engine:
    right = {
        "model": lambda rngs: Net(rngs),
        "loss_fn": squared,
        "optimizer": optax.adam(1e-3),
        "sample_batch": jax.ShapeDtypeStruct((ROWS, IN), np.float32),
        "mesh": make_mesh(data=8),
    }
    return jaxpar.initialize(**(right | change))


def strict(engine: jaxpar.Engine) -> Budget:
    """What the design names, and besides it nothing but scalars."""
    return dataclasses.replace(engine.closed_form_budget(), small_bytes=100)


@pytest.mark.parametrize(
    ("number", "misses"), [(960, False), (949, True), (0, True), (10**6, False)]
)
def test_reductions_are_at_least_what_is_named_small_ones_too(number, misses):
    floor = {"data": {"reduction": 1000}}
    budget = allowed({"data": {"reduction": MB}}, at_least=floor)
    halves = [gather(number // 2, kind=k) for k in ("all-reduce", "reduce-scatter")]
    step = measured(*halves, gather(500))
    said = check(budget, step)
    assert bool(said) == misses
    if misses:
        assert said[0].startswith(
            f"data: all-reduce and reduce-scatter moves {number // 2 * 2:,} bytes a "
            "step, but must move at least 1,000: gradients are not reduced as they"
        )
    unknown = dataclasses.replace(step, is_complete=False)
    assert not check(budget, unknown)
    assert record(unknown).at_least == {}


def test_other_kinds_have_a_floor_of_their_own():
    budget = allowed(at_least={"data": {"all-to-all": 1000}})
    assert not check(budget, measured(gather(1000, kind="all-to-all")))
    (said,) = check(budget, measured(gather(1000, kind="all-reduce")))
    assert said.startswith("data: all-to-all moves 0 bytes a step, but must move")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("coupled", [False, True])
def test_every_stage_keeps_to_its_row_of_the_table(zero, coupled):
    engine = make_engine(
        zero=zero, accumulate=2, coupled_batch=coupled, precision="bf16"
    )
    budget = strict(engine)
    step = engine.verify(budget)
    assert step.state_bytes == budget.state_bytes
    gathers = {0: 0, 1: 1, 2: 1, 3: 4}[zero]
    named = budget.communicated["data"].get("all-gather", 0)
    assert named == pytest.approx(KERNELS * gathers, rel=0.01)
    gathered = step.communicated["data"].get("all-gather", 0)
    # The backward pass needs the first kernel for nothing, and begins with the last.
    assert gathered == pytest.approx(named / (2 if zero == 3 else 1), rel=0.01)
    if not coupled:
        reduced = sum(n for k, n in step.communicated["data"].items() if "reduce" in k)
        assert reduced == pytest.approx(KERNELS * (2 if zero > 1 else 1), rel=0.01)


def test_design_counts_the_micro_batches_that_the_engine_was_given():
    engine = make_engine(zero=2, accumulate=4)
    engine.verify()
    engine.spec = dataclasses.replace(engine.spec, accumulate=1)
    with pytest.raises(jaxpar.BudgetExceeded, match=r"\(4\.0 times as much\)"):
        engine.verify(engine.closed_form_budget())


@pytest.mark.parametrize(("zero", "num_blocks"), [(0, 4), (3, 3)])
def test_pipeline_keeps_to_once_a_step(zero, num_blocks):
    """With three blocks on two stages, a place is idle and crosses all the same."""
    engine = make_pipelined(
        make_model(num_blocks=num_blocks),
        mesh=make_mesh(data=2, pipe=2),
        accumulate=2,
        zero=zero,
    )
    engine.verify(strict(engine))


def test_tensor_is_not_bounded_by_design_but_is_as_recorded():
    rules = {"up/kernel": P(None, "tensor"), "down/kernel": P("tensor", None)}
    engine = make_engine(mesh=make_mesh(data=4, tensor=2), rules=rules)
    recorded = engine.verify()
    assert recorded.communicated["tensor"]["all-reduce"] >= ROWS // 4 * IN * 4
    assert recorded == engine.verify(recorded)
    recorded.communicated.pop("tensor")
    with pytest.raises(jaxpar.BudgetExceeded, match=r"tensor: all-reduce .*\n?.* name"):
        engine.verify(recorded)


def test_coupled_batch_keeps_to_its_stage_where_leaves_rest_over_tensor_too():
    mesh = make_mesh(data=4, tensor=2)
    make_engine(mesh=mesh, zero=1, coupled_batch=True).verify()


@pytest.mark.usefixtures("unchecked_types")
def test_step_is_compiled_for_todays_lines():
    class Lowered:
        def compile(self):
            name = "jax_compilation_cache_include_metadata_in_key"
            raise KeyError(getattr(jax.config, name))

    with pytest.raises(KeyError, match="True"):
        make_engine().measure({"step": Lowered()})


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_planted_collective_is_named_by_its_line(zero):
    engine = make_engine(zero=zero, loss_fn=planted, coupled_batch=True)
    with pytest.raises(jaxpar.BudgetExceeded) as caught:
        engine.verify()
    said = str(caught.value)
    assert said.startswith("verify: the compiled step does not keep to its budget.")
    (violation,) = caught.value.violations
    assert "data: all-gather moves" in violation
    assert f"1 x all-gather of f32[{ROWS},{MIDDLE}], " in violation
    source, start = inspect.getsourcelines(planted)
    lines = [start + i for i, x in enumerate(source) if "model.up" in x or "P()" in x]
    assert any(f"tests/compiled/test_budget.py:{line}\n" in said for line in lines)


def test_optimizer_state_left_whole_is_named(monkeypatch):
    def whole_moments(own):
        shardings = state_shardings(own.abstract, own.leaves, own.zero, own.mesh)
        adam = shardings.opt_state[0]
        nowhere = jax.sharding.NamedSharding(own.mesh, P())
        whole = adam._replace(mu=jax.tree.map(lambda _: nowhere, adam.mu))
        states = whole, *shardings.opt_state[1:]
        return dataclasses.replace(shardings, opt_state=states)

    monkeypatch.setattr(Placement, "shardings", property(whole_moments))
    engine = make_engine()
    with pytest.raises(jaxpar.BudgetExceeded) as caught:
        engine.verify()
    said = caught.value.violations[0]
    for kernel, shape in (("up", [IN, MIDDLE]), ("down", [MIDDLE, IN])):
        assert (
            f"opt_state/0/mu/{kernel}/kernel (float32{shape}) is stored as (): "
            f"{IN * MIDDLE * 4:,} bytes, {IN * MIDDLE * 4 // 8:,} if sharded over all "
            "8 devices"
        ) in said
    assert "opt_state/0/nu" not in said


def test_model_that_outgrew_its_record_is_told_which_leaves_do_not_divide():
    def of_width(width: int) -> jaxpar.Engine:
        return make_engine(
            model=lambda rngs: nnx.Linear(width, width, rngs=rngs),
            loss_fn=lambda model, batch: jnp.mean(model(batch) ** 2),
            sample_batch=jax.ShapeDtypeStruct((8, width), np.float32),
        )

    with pytest.raises(
        jaxpar.BudgetExceeded,
        match=r"params/kernel \(float32\[65, 65\]\) is stored as \(None, None\): "
        r"16,900 bytes, 2,113 if sharded over all 8 devices \(replicated over data: "
        r"8 divides no dim",
    ):
        of_width(65).verify(of_width(64).budget())
