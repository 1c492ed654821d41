"""Do replicas that train by themselves do what a simulation on one device does?

The simulation has a plain loop for each replica, of its rows alone, and optax outside.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import tree
from jaxpar.optim import diloco
from tests.equivalence.perceptron import (
    ROWS,
    Net,
    batches,
    first_params,
    loss_fn,
    loss_of,
    make_piped_engine,
)
from tests.equivalence.problems import distance

pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)
INNER = optax.inject_hyperparams(optax.adamw)(1e-2, eps=1e-6)
EVERY, REPLICAS = 3, 2
OWN = diloco(INNER, replicas=REPLICAS, every=EVERY)
OUTER = OWN.outer
MANY = [*batches(), *batches()[:2]]


def make(
    optimizer: Any, data: int, tensor: int, zero: int, **given: Any
) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(replica=REPLICAS, data=data, tensor=tensor)
    return jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=optimizer,
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        zero=zero,
        rules={"mlp": "tensor"},
        **given,
    )


def simulated(
    clip_norm: float, names: list[list[str]], every: int = EVERY
) -> tuple[list[float], Any]:
    """Losses, and the parameters that were joined last, fragment by fragment."""
    common: Any = first_params()
    locals_: list[Any] = [common] * REPLICAS
    states: list[Any] = [INNER.init(common)] * REPLICAS
    by_name = tree.named_leaves
    outer: list[Any] = [
        OUTER.init({n: by_name(common)[n] for n in own}) for own in names
    ]
    losses, count = [], ROWS // REPLICAS
    step = jax.jit(jax.value_and_grad(loss_of))
    for number, batch in enumerate(MANY):
        values = []
        for replica in range(REPLICAS):
            own = slice(replica * count, (replica + 1) * count)
            rows = {name: x[own] for name, x in batch.items()}
            value, grads = step(locals_[replica], rows)
            factor = min(1.0, clip_norm / float(optax.tree.norm(grads)))
            grads = jax.tree.map(lambda g, factor=factor: factor * g, grads)
            given = grads, states[replica], locals_[replica]
            updates, states[replica] = INNER.update(*given)
            locals_[replica] = optax.apply_updates(locals_[replica], updates)
            values.append(float(value))
        losses.append(float(np.mean(values)))
        for part, own in enumerate(names):
            if (number + 1 + part * every // len(names)) % every:
                continue
            now = dict(by_name(common))
            found = [by_name(x) for x in locals_]
            means = {n: now[n] - sum(x[n] for x in found) / REPLICAS for n in own}
            given = means, outer[part], {n: now[n] for n in own}
            updates: Any
            updates, outer[part] = OUTER.update(*given)
            for n in own:
                now[n] = now[n] + updates[n]
            structure = jax.tree.structure(common)
            common = jax.tree.unflatten(structure, now.values())
            for replica, x in enumerate(found):
                joined = {**x, **{n: now[n] for n in own}}
                locals_[replica] = jax.tree.unflatten(structure, joined.values())
    return losses, common


@pytest.mark.parametrize(
    ("data", "tensor", "zero", "options"),
    [
        (2, 2, 3, {"accumulate": 2, "clip_norm": 0.2}),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                (1, 1, 0, {}),
                (4, 1, 1, {}),
                (2, 2, 2, {}),
                (2, 1, 3, {"prefetch": True}),
                (2, 1, 1, {"precision": "fp16"}),
                (2, 1, 1, {"precision": "bf16"}),
            ]
        ),
    ],
)
def test_replicas_train_as_the_simulation(data, tensor, zero, options) -> None:
    engine = make(OWN, data, tensor, zero, **options)
    losses = [float(engine.step(batch)["loss"]) for batch in MANY]
    names = OWN.names(first_params())
    right, common = simulated(options.get("clip_norm", 1e9), names)
    bound = 2e-2 if "precision" in options else 1e-5
    assert losses == pytest.approx(right, rel=bound)
    assert distance(engine.state.params, common) <= (0.1 if bound > 1e-3 else 1e-5)
    engine.verify()
    engine.probe()


def test_fragments_are_joined_at_steps_of_their_own() -> None:
    own = diloco(INNER, replicas=REPLICAS, every=EVERY, fragments=2)
    engine = make(own, 2, 1, 1)
    losses = [float(engine.step(batch)["loss"]) for batch in MANY]
    names = own.names(first_params())
    assert all(names)
    right, common = simulated(1e9, names)
    assert losses == pytest.approx(right, rel=1e-5)
    assert distance(engine.state.params, common) <= 1e-5


def test_between_joins_only_scalars_go_between_replicas(tmp_path: Path) -> None:
    """A checkpoint between two joins goes on as if nothing had been."""
    engine = make(OWN, 2, 2, 3)
    told = [engine.step(batch) for batch in MANY[:4]]
    assert [float(metrics["joined"]) for metrics in told] == [0, 0, 1, 0]
    assert float(told[0]["learning_rate"]) == pytest.approx(1e-2)
    engine.save(tmp_path)
    engine.wait()
    other = make(OWN, 4, 1, 1)
    other.restore(tmp_path)
    for batch in MANY[4:]:
        loss, right = other.step(batch)["loss"], engine.step(batch)["loss"]
        assert float(loss) == pytest.approx(float(right), rel=1e-5)
    assert distance(other.state.params, engine.state.params) <= 1e-5


@pytest.mark.thorough
def test_results_do_not_depend_on_pipe() -> None:
    def losses_on(pipe: int) -> list[float]:
        shape = jaxpar.MeshShape(replica=REPLICAS, data=2, pipe=pipe)
        mesh = jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices])
        engine = make_piped_engine(OWN, mesh=mesh)
        losses = [float(engine.step(batch)["loss"]) for batch in MANY]
        engine.verify()
        return losses

    assert losses_on(2) == pytest.approx(losses_on(1), rel=1e-5)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    engine = make(OWN, 2, 1, 1)
    engine.step(MANY[0])
    before = jax.device_get((engine.state.params, engine.state.opt_state))
    bad = {name: x.copy() for name, x in batches()[0].items()}
    bad["x"][-1] = np.nan  # Of one replica alone.
    assert int(engine.step(bad)["skipped"]) == 1
    after = jax.device_get((engine.state.params, engine.state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_new_parameters_are_every_replica_s() -> None:
    """Also between two joins, when replicas have moved."""
    engine = make(OWN, 2, 1, 1)
    engine.step(MANY[0])
    zeros = jax.tree.map(np.zeros_like, first_params())
    engine.load_params(zeros)
    found = float(engine.step(MANY[0])["loss"])
    assert found == pytest.approx(float(loss_of(zeros, MANY[0])), rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "options", "said"),
    [
        (
            diloco(INNER, replicas=4),
            {},
            "replicas=4 must be the mesh's, which has repl",
        ),
        (OWN, {"coupled_batch": True}, "can't run with examples that are coupled"),
    ],
)
def test_where_it_can_not_run_is_refused(optimizer, options, said) -> None:
    with pytest.raises(ValueError, match=said):
        make(optimizer, 2, 1, 1, **options)
