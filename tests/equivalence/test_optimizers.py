"""Do optimizers with whole-leaf, masked or nested state train as they do unsharded?

Adafactor keeps rows and columns of another shape than the parameter, multi_transform
masks leaves out, MultiSteps nests another optimizer and its own accumulator. Losses of
12 steps to 1e-5 relative, parameters to 1e-5 by leaf.
"""

import functools

import jax
import optax
import pytest

import jaxpar
from tests.equivalence import problems

STEPS = 12


def labels(params: dict) -> dict:
    """Kernels to one optimizer, the rest to another."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" if path[-1].key == "kernel" else "rest", params
    )


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "multi_transform": optax.multi_transform(
        {"kernel": optax.adamw(1e-3, eps=1e-6), "rest": optax.sgd(1e-2, 0.9)}, labels
    ),
    "multi_steps": optax.MultiSteps(
        optax.adamw(1e-3, eps=1e-6), 3
    ).gradient_transformation(),
}


@functools.cache
def params_and_batches() -> tuple[dict, list[dict]]:
    engine = make_engine(optax.sgd(0.0), (1, 1), zero=0)
    return jax.device_get(engine.state.params), problems.make_batches(STEPS)


def make_engine(
    optimizer: optax.GradientTransformation, mesh: tuple[int, int], zero: int
) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(data=mesh[0], tensor=mesh[1])
    return jaxpar.initialize(
        model=problems.make_model("linen"),
        loss_fn=problems.weighted_loss,
        optimizer=optimizer,
        sample_batch=problems.make_batches(1)[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: mesh[0] * mesh[1]]),
        zero=zero,
        clip_norm=problems.CLIP,
    )


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_optimizer_trains_like_one_device(name: str, zero: int) -> None:
    optimizer = OPTIMIZERS[name]
    params, batches = params_and_batches()
    right = problems.run_plainly("linen", "weighted", params, optimizer, batches)
    engine = make_engine(optimizer, (4, 2), zero)
    losses = [float(engine.step(batch)["loss"]) for batch in batches]
    assert losses == pytest.approx(right.losses, rel=1e-5)
    assert problems.distance(engine.state.params, right.params) <= 1e-5


def test_state_that_mirrors_a_parameter_rests_like_it() -> None:
    engine = make_engine(OPTIMIZERS["multi_transform"], (4, 2), zero=1)
    flat, _ = jax.tree_util.tree_flatten_with_path(engine.state.opt_state)
    mirrored = [
        (leaf, engine.state.params[path[-2].key][path[-1].key])
        for path, leaf in flat
        if leaf.ndim == 2
    ]
    assert len(mirrored) == 2 * 3 + 1, "mu and nu of three kernels, one trace"
    for leaf, param in mirrored:
        assert leaf.sharding == param.sharding
        assert not leaf.sharding.is_fully_replicated
