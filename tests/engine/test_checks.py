"""Which arguments are refused before anything is traced, and with which remedy?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

import jaxpar
from jaxpar.engine.checks import check_arguments, check_elements, check_trainable
from jaxpar.mesh import MeshShape, as_mesh, make_mesh
from tests.optim.sign_momentum import SignMomentum


def check(**change: Any) -> None:
    right = {
        "optimizer": optax.sgd(0.1),
        "clip_norm": None,
        "seed": 0,
        "carried": (),
    }
    check_arguments(**(right | change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"seed": 2**32 - 1},
        {"clip_norm": 1e-6},
        {"clip_norm": float("inf")},
        {"optimizer": optax.MultiSteps(optax.sgd(0.1), 2)},
        {"optimizer": SignMomentum(0.1)},
    ],
    ids=[
        "default",
        "largest seed",
        "small norm",
        "no clipping",
        "several steps",
        "a user's own",
    ],
)
def test_values_in_range_are_taken(change):
    check(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, r"seed=-1 must be an integer from 0"),
        ({"seed": 2**32}, r"seed=4294967296 must be an integer from 0 to 2\*\*32 - 1"),
        (
            {"clip_norm": 0.0},
            r"clip_norm=0\.0 must be positive, or None for no clipping",
        ),
        ({"clip_norm": -1.0}, r"clip_norm=-1\.0 must be positive"),
        ({"clip_norm": float("nan")}, "clip_norm=nan must be pos"),
    ],
)
def test_number_out_of_range_raises(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check(**change)


@pytest.mark.parametrize("seed", [1.0, "1", None])
def test_seed_that_is_not_an_integer_raises(seed, unchecked_types):
    with pytest.raises(ValueError, match=r"seed=.* must be an integer from 0"):
        check(seed=seed)


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("data",), (AxisType.Auto,)),
        (("tensor", "data", "pipe"), (AxisType.Auto,) * 3),
        (("data", "pipe", "tensor"), (AxisType.Explicit,) * 3),
    ],
    ids=["axes", "order", "explicit"],
)
def test_mesh_not_made_for_the_engine_raises(names, kinds):
    shape = (8, 1, 1)[: len(names)]
    mesh = jax.make_mesh(shape, names, axis_types=kinds)
    message = (
        r"mesh: its axes are \('\w+'.* of types \(.*\), but must be \('data', 'pipe', "
        r"'tensor'\), or .* all automatic\. Pass a jaxpar\.MeshShape, or say which role"
    )
    with pytest.raises(ValueError, match=message):
        as_mesh(mesh)


OPTIMIZERS = {
    "rate": (1e-3, r"optimizer=0\.001 must .*; pass a learning rate to one, as in op"
             r"tax\.adamw\(0\.001\)"),
    "factory": (optax.adamw, r"optimizer=<function adamw.*> must be an optax trans"
                r"formation, with init and update, or make its own update, with "
                r"init and make_update \(jaxpar\.optim\.MakesUpdate\); call its f"),
    "schedule": (
        optax.cosine_decay_schedule(1e-3, 10),
        r"optimizer=<function cosine_decay_schedule.*> must .* call its factory, as in "
        r"optax\.adamw\(1e-3\), and pass a schedule to it, as in optax\.adamw\(sched",
    ),
    "nnx.Optimizer": (
        nnx.Optimizer(
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param
        ),
        r"optimizer=Optimizer\(\.\.\.\) must .*; pass the one inside it, "
        r"optimizer=tx for nnx\.Optimizer\(model, tx\)",
    ),
    "neither": (type("Half", (), {"init": None})(), r"optimizer=<.*Half object.* must "
                r"be an optax transformation, with init and update, or make its own"),
    "name": ("adamw", r"optimizer='adamw' must be .* call its factory, as in opt"),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_what_is_not_an_optimizer_raises(case):
    optimizer, message = OPTIMIZERS[case]
    with pytest.raises(TypeError, match=message):
        check(optimizer=optimizer)


def struct(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, 3), dtype)


def test_parameters_of_any_floating_dtype_can_be_trained():
    check_trainable({"a": struct(jnp.float32), "b": {"c": struct(jnp.bfloat16)}})


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.bool_])
def test_parameter_without_a_real_gradient_raises(dtype):
    message = (
        rf"model: parameter b/c is {np.dtype(dtype)}, but a parameter must be "
        r"floating to be trained\. Make it another kind of nnx\.Variable, or put "
        "it into another Linen collection than params"
    )
    with pytest.raises(ValueError, match=message):
        check_trainable({"a": struct(jnp.float32), "b": {"c": struct(dtype)}})


def test_no_parameters_raise():
    with pytest.raises(ValueError, match=r"model: it has no parameters to train"):
        check_trainable({})


def test_parameter_without_elements_is_taken_on_one_device_only():
    params = {"a": struct(jnp.float32), "w": jax.ShapeDtypeStruct((0, 6), jnp.float32)}
    check_elements(params, make_mesh(MeshShape(data=1), jax.devices()[:1]))
    message = r"model: parameter w has shape \(0, 6\) and no elements; .* on one device"
    with pytest.raises(ValueError, match=message):
        check_elements(params, make_mesh(MeshShape(data=2), jax.devices()[:2]))


def make_linear(**change: Any) -> Any:
    given = {
        "model": lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        "loss_fn": lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        "optimizer": optax.sgd(0.1),
        "sample_batch": {"x": np.ones((8, 4), np.float32)},
    }
    return jaxpar.initialize(**(given | change))


def test_expert_axis_that_no_rule_uses_is_refused():
    mesh = MeshShape(data=4, expert=2)
    message = (
        r"^mesh: expert=2, but no rule splits a parameter over it; name the experts' "
        r"dim, rules=\{'expert': 'expert'\} or .*or give these devices to data\.$"
    )
    with pytest.raises(ValueError, match=message):
        make_linear(mesh=mesh)
    make_linear(mesh=mesh, rules={"kernel": jax.P(None, "expert")})


def test_tensor_axis_that_no_rule_uses_is_warned_of():
    mesh = MeshShape(data=4, tensor=2)
    message = (
        r"^mesh: tensor=2, but no rule splits a parameter over it, .* compute the "
        r"same; split some, rules=\{'\*/kernel': .*or give these devices to data\.$"
    )
    with pytest.warns(UserWarning, match=message):
        make_linear(mesh=mesh)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "change",
    [
        {"mesh": MeshShape(data=8)},
        {"rules": {"kernel": jax.P(None, "tensor")}},
        {"model": nn.Dense(8), "flax_rules": [("activations", "tensor")]},
    ],
    ids=["no axis", "a parameter", "activations"],
)
def test_tensor_axis_that_is_not_there_or_splits_something_is_not(change):
    flax_rules = change.pop("flax_rules", ())
    with nn.logical_axis_rules(flax_rules):
        make_linear(**({"mesh": MeshShape(data=4, tensor=2)} | change))


def test_rule_that_gives_an_axis_twice_is_refused():
    rules = {"kernel": jax.P("tensor", "tensor")}
    with pytest.raises(ValueError, match=r"kernel.*tensor"):
        make_linear(mesh=MeshShape(data=4, tensor=2), rules=rules)


@pytest.mark.parametrize("roles", [{"x": "data"}, {"x": "data", "y": "rows"}], ids=str)
def test_axis_without_a_role_is_refused(roles):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"must give each axis of the mesh, \('x', 'y"):
        make_mesh(mesh, roles=roles)
