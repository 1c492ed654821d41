"""Is one constraint right with automatic axes, with manual ones, and with no mesh?"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.sharding.constrain import constrain, placed_rules, rows_are_automatic


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshShape(data=4, tensor=2))


def stated(fn, x) -> list[P]:
    """The specs that a trace of `fn` constrains to."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "sharding_constraint":
                found.append(eqn.params["sharding"].spec)
            elif eqn.primitive.name == "shard_map":
                visit(eqn.params["jaxpr"])

    visit(jax.make_jaxpr(fn)(x).jaxpr)
    return found


def test_without_a_mesh_the_array_comes_back():
    x = jnp.ones((4, 2))
    assert constrain(x, "data", "no axis at all") is x


def test_automatic_axes_are_stated(mesh):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        specs = stated(
            lambda x: constrain(x, "data", None, "tensor"), np.ones((4, 3, 2))
        )
    assert specs == [P("data", None, "tensor")]


def test_rows_are_the_compilers_where_their_axes_are_automatic(mesh):
    def traced(x: jax.Array) -> jax.Array:
        found.append(rows_are_automatic())
        return x

    found: list[bool] = []
    jax.eval_shape(traced, jnp.ones(8))
    with jax.set_mesh(mesh):
        jax.eval_shape(traced, jnp.ones(8))
        manual = jax.shard_map(
            traced,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=False,
        )
        jax.eval_shape(manual, jnp.ones(8))
    with jax.set_mesh(make_mesh(MeshShape(tensor=2), jax.devices()[:2])):
        jax.eval_shape(traced, jnp.ones(8))
    assert found == [False, True, False, False]


def test_missing_entries_are_whole(mesh):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        specs = stated(lambda x: constrain(x, ("tensor", "data")), np.ones((8, 3)))
    assert specs == [P(("tensor", "data"))]


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("data", "tensor"), P(None, "tensor")),
        ((("data", "tensor"), None), P("tensor", None)),
        (("data",), P(None)),
    ],
)
def test_manual_axes_are_dropped(mesh, axes, spec):
    run = jax.shard_map(
        lambda x: constrain(x, *axes),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    assert stated(run, np.ones((8, 4))) == [spec]


def test_nothing_is_stated_where_all_axes_are_manual(mesh):
    run = jax.shard_map(
        lambda x: constrain(x, "data", "tensor"),
        mesh=mesh,
        in_specs=P("data", "tensor"),
        out_specs=P("data", "tensor"),
        check_vma=False,
    )
    assert stated(run, np.ones((8, 4))) == []


def test_layout_is_what_was_stated(mesh):
    @jax.jit
    def run(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return constrain(x, "data", "tensor")

    x = np.arange(32.0).reshape(8, 4)
    out = run(jax.device_put(x, NamedSharding(mesh, P())))
    assert np.array_equal(out, x)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "tensor")), 2)


def test_more_entries_than_dims_raises():
    message = (
        r"constrain: axes=\('data', None\) has 2 entries for an array of 1 dims "
        r"\(shape \(4,\)\); give at most one entry per dim"
    )
    with pytest.raises(ValueError, match=message):
        constrain(jnp.ones(4), "data", None)


@pytest.mark.parametrize("entry", ["rows", ("data", "rows")])
def test_unknown_axis_raises(mesh, entry):
    message = r"axis 'rows' is not an axis of the mesh; use one of 'data', 'pipe', 'te"
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        pytest.raises(ValueError, match=message),
    ):
        constrain(jnp.ones((4, 2)), entry)


def test_one_device_gets_no_constraint_that_would_hold_fusion_back():
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(lambda x: constrain(x, "data"))(jnp.ones(4))
    assert not jaxpr.jaxpr.eqns


RULES = (
    ("batch", ("data", "fsdp")),
    ("mlp", "model"),
    ("length", "X"),
    ("head", None),
)


def test_flax_rules_name_the_axes_that_the_compiler_places(mesh):
    free = P.UNCONSTRAINED
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert placed_rules(RULES) == (
            ("batch", ("data",)),
            ("mlp", ("tensor",)),
            ("length", free),
            ("head", None),
        )
    found = []

    def look(x):
        found.extend(placed_rules(RULES))
        return x

    jax.eval_shape(
        jax.shard_map(
            look,
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
        ),
        jnp.ones(4),
    )
    assert dict(found) == {
        "batch": free,
        "mlp": ("tensor",),
        "length": free,
        "head": None,
    }


@pytest.mark.usefixtures("checked_losses")
@pytest.mark.parametrize("context", [False, True])
def test_bare_constraint_of_a_model_says_what_to_write(context):
    """Of JAX's own messages none says so, and one blamed half of the rows."""

    def loss(model, x):
        out = jax.lax.with_sharding_constraint(model(x), P("data"))
        return jnp.mean(out**2)

    x = np.ones((16, 4), np.float32)
    mesh = make_mesh(MeshShape(data=8))
    with (
        jax.set_mesh(mesh) if context else contextlib.nullcontext(),
        pytest.raises((RuntimeError, ValueError), match="mesh") as caught,
    ):
        jaxpar.initialize(
            model=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
            loss_fn=loss,
            optimizer=optax.sgd(0.1),
            sample_batch=x,
        ).step(x)
    assert "jaxpar.constrain(x" in caught.value.__notes__[0]
    assert caught.value.__cause__ is None
