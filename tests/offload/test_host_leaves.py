"""Is as much of the state on the host as was asked for, by whole leaves?"""

import jax
import optax
import pytest

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.offload.host_leaves import choose_host_leaves
from jaxpar.sharding.zero import shard_leaves, zero_stage
from jaxpar.step.update import UpdateSpec
from jaxpar.tree import named_leaves

SHAPES = {"a": (64, 8), "b": (32, 8), "c": (16, 8), "d": (8, 8), "e": (8,)}


def spec_of(optimizer: optax.GradientTransformation, zero: int = 0) -> UpdateSpec:
    mesh = make_mesh(MeshShape(data=4), jax.devices()[:4])
    params = {
        name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()
    }
    rules = {name: (None,) * len(shape) for name, shape in SHAPES.items()}
    leaves = shard_leaves(params, rules, zero_stage(zero), mesh.shape, ())
    state = jax.eval_shape(optimizer.init, params)
    return UpdateSpec(tuple(leaves.values()), mesh, params, state, "float32")


def test_moments_stand_beside_their_parameters() -> None:
    spec = spec_of(optax.adam(0.1))
    found = choose_host_leaves(spec, 1.0, least=64)
    names = list(named_leaves(spec.opt_state))
    assert list(found) == ["a", "b", "c", "d"], "a bias is too small"
    assert [names[n] for n in found["b"].moments] == ["0/mu/b", "0/nu/b"]
    assert found["b"].num_bytes == 3 * 4 * 32 * 8


def test_bytes_are_those_of_a_device() -> None:
    found = choose_host_leaves(spec_of(optax.adam(0.1), zero=1), 1.0, least=1)
    assert found["a"].num_bytes == 3 * 4 * 64 * 8 // 4


@pytest.mark.parametrize(
    ("fraction", "names"),
    [
        (0.0, []),
        (0.5, ["a"]),
        (0.4, ["b", "c"]),
        (0.8, ["a", "b"]),
        (0.25, ["b"]),
        (1.0, ["a", "b", "c"]),
    ],
)
def test_the_largest_that_fit_are_chosen(fraction: float, names: list[str]) -> None:
    found = choose_host_leaves(spec_of(optax.sgd(0.1)), fraction, least=100)
    assert list(found) == names


def test_rows_and_columns_of_adafactor_are_not_of_the_shape() -> None:
    optimizer = optax.adafactor(0.1, min_dim_size_to_factor=8)
    found = choose_host_leaves(spec_of(optimizer), 1.0, least=1)
    assert found["a"].moments == ()
