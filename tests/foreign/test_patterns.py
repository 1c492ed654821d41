"""Does each pattern of `tests.foreign.patterns` train like one device, by plain Flax?

Losses of four steps to 1e-5 relative; parameters and state after them to 1e-5 by leaf
(SGD with momentum).
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.model.bridge import make_network
from jaxpar.sharding.rules import compute_specs
from jaxpar.tree import named_leaves
from tests.foreign.patterns import CASES, make_batches

STEPS = 4
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
DATA, TENSOR = jaxpar.MeshShape(data=8), jaxpar.MeshShape(data=4, tensor=2)


def make_engine(name: str, mesh: jaxpar.MeshShape, zero: int) -> jaxpar.Engine:
    case = CASES[name]
    with nn.logical_axis_rules(case.axis_rules):
        return jaxpar.initialize(
            model=case.model,
            loss_fn=case.loss_fn,
            optimizer=OPTIMIZER,
            sample_batch=make_batches(1)[0],
            mesh=mesh,
            zero=zero,
        )


def train(engine: jaxpar.Engine) -> tuple[list[float], dict]:
    losses = [float(engine.step(batch)["loss"]) for batch in make_batches(STEPS)]
    return losses, variables_of(engine)


def variables_of(engine: jaxpar.Engine) -> dict[str, np.ndarray]:
    state = engine.state
    return named_leaves(jax.device_get((state.params, state.model_state)))


def train_plainly(name: str, before: tuple[dict, dict]) -> tuple[list[float], dict]:
    """One device, from the same parameters and state."""
    is_linen = isinstance(CASES[name].model, nn.Module)
    loss = plain_linen(name) if is_linen else plain_nnx(name)

    @jax.jit
    def step(params: dict, state: dict, opt_state: Any, batch: dict) -> tuple:
        grads_of = jax.value_and_grad(loss, has_aux=True)
        (value, state), grads = grads_of(params, state, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return value, optax.apply_updates(params, updates), state, opt_state

    params, state = before
    losses, opt_state = [], OPTIMIZER.init(params)
    for batch in make_batches(STEPS):
        value, params, state, opt_state = step(params, state, opt_state, batch)
        losses.append(float(value))
    return losses, named_leaves(jax.device_get((params, state)))


def plain_linen(name: str) -> Callable[..., tuple]:
    plain = CASES[name].plain
    assert plain is not None

    def loss(params: dict, state: dict, batch: dict) -> tuple[jax.Array, dict]:
        return plain({"params": params, **state}, batch)

    return loss


def plain_nnx(name: str) -> Callable[..., tuple]:
    case = CASES[name]
    kinds = (nnx.Param, nnx.RngState, nnx.Intermediate, ...)

    with nnx.use_eager_sharding(False):
        made = (case.plain or case.model)(rngs=nnx.Rngs(0))

    def loss(params: dict, state: dict, batch: dict) -> tuple[jax.Array, dict]:
        graphdef, own, rngs, _, rest = nnx.split(made, *kinds)
        nnx.replace_by_pure_dict(own, params)
        nnx.replace_by_pure_dict(rest, state)
        with nnx.use_eager_sharding(False):
            model = nnx.merge(graphdef, own, rngs, rest)
        value = case.loss_fn(model, batch)
        return value, nnx.to_pure_dict(nnx.state(model, *kinds)[-1])

    return loss


def check(name: str, mesh: jaxpar.MeshShape, zero: int) -> None:
    engine = make_engine(name, mesh, zero)
    assert engine.spec.coupled == CASES[name].coupled
    before = jax.device_get((engine.state.params, engine.state.model_state))
    losses, after = train(engine)
    right, expected = train_plainly(name, before)
    assert losses == pytest.approx(right, rel=1e-5)
    assert right[-1] != right[0]
    assert after.keys() == expected.keys()
    for leaf, value in expected.items():
        error = np.linalg.norm(after[leaf] - value)
        assert error <= 1e-5 * np.linalg.norm(value) + 1e-7, leaf


@pytest.mark.parametrize(
    ("name", "mesh", "zero"),
    [
        ("arrays", TENSOR, 3),
        ("capture", DATA, 0),
        ("linen_axis_name", TENSOR, 3),
        ("linen_sow", DATA, 3),
        ("logical_names", TENSOR, 3),
    ],
)
def test_pattern_trains_like_one_device(name, mesh, zero):
    check(name, mesh, zero)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(
    ("mesh", "zero"), [(DATA, 0), (TENSOR, 1), (DATA, 2), (TENSOR, 3)]
)
@pytest.mark.parametrize("name", CASES)
def test_every_pattern_trains_like_one_device(name, mesh, zero):
    check(name, mesh, zero)


@pytest.mark.parametrize("name", ["names", "linen_names", "logical_names"])
def test_names_of_another_mesh_split_every_kernel_over_tensor(name):
    case = CASES[name]
    with nn.logical_axis_rules(case.axis_rules):
        network = make_network(case.model, case.loss_fn, make_batches(1)[0])
    params, _ = jax.eval_shape(network.init, jax.random.key(0))
    shapes = {leaf: x.shape for leaf, x in named_leaves(params).items()}
    names, sizes = network.dim_names(), {"data": 4, "pipe": 1, "tensor": 2}
    specs = compute_specs(shapes, names, {}, sizes, network.axis_rules)
    assert all(("tensor" in specs[x]) == x.endswith("kernel") for x in specs), specs


@pytest.mark.slow
def test_array_that_changes_is_restored_on_another_mesh(tmp_path):
    engine = make_engine("changing_array", TENSOR, 3)
    _, trained = train(engine)
    engine.save(tmp_path)
    engine.wait()
    other = make_engine("changing_array", DATA, 0)
    other.restore(tmp_path)
    for leaf, value in variables_of(other).items():
        np.testing.assert_array_equal(value, trained[leaf])
    assert np.abs(trained["1/scale"] - np.linspace(0.5, 1.5, 8)).min() > 0
