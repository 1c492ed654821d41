"""Does a run of adapters on a frozen base train as plain optax on one device?

The layers are Flax's own LoRA. The base is stored in bf16 or int8, split as ZeRO's
stage says, without gradients and moments.
"""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import tree
from jaxpar.checkpoint.exports import export
from tests.equivalence.perceptron import STEPS, batches, loss_fn

RANK, HIDDEN = 4, 64
ADAM = optax.adamw(1e-2)
SPLIT = {"up/base_module/kernel": P(None, "tensor")}


class Int8Linear(nnx.Module):
    """A layer whose kernel is stored as int8 with a scale a column."""

    def __init__(self, in_features: int, features: int, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.2)(rngs.params(), (in_features, features))
        scale = jnp.max(jnp.abs(draw), 0) / 127
        self.kernel = nnx.Param(jnp.round(draw / scale).astype(jnp.int8))
        self.scale = nnx.Param(scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x @ self.kernel[...].astype(x.dtype)) * self.scale[...].astype(x.dtype)


class Net(nnx.Module):
    """Two layers of a base in `dtype`, each with an adapter."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.2)

        def linear(in_features: int, features: int) -> nnx.Module:
            if dtype == jnp.int8:
                return Int8Linear(in_features, features, rngs)
            kernel = {"kernel_init": normal, "param_dtype": dtype}
            return nnx.Linear(in_features, features, rngs=rngs, **kernel)

        def adapted(in_features: int, features: int) -> nnx.LoRA:
            base = linear(in_features, features)
            given = in_features, RANK, features
            return nnx.LoRA(*given, base_module=base, b_initializer=normal, rngs=rngs)

        self.up = adapted(16, HIDDEN)
        self.out = adapted(HIDDEN, 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.up(x)))


def make_engine(
    zero: int, mesh: jaxpar.MeshShape | None = None, dtype: Any = jnp.bfloat16, **more
) -> jaxpar.Engine:
    mesh = mesh or jaxpar.MeshShape(data=4)
    options = {"trainable": nnx.LoRAParam, "rules": SPLIT, **more}
    return jaxpar.initialize(
        model=lambda rngs: Net(dtype, rngs),
        loss_fn=loss_fn,
        optimizer=ADAM,
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(mesh, jax.devices()[: mesh.num_devices]),
        zero=zero,
        **options,
    )


def plain_loss(params: dict, frozen: dict, batch: dict) -> jax.Array:
    """The model in plain JAX, from nested dicts."""

    def layer(name: str, x: jax.Array) -> jax.Array:
        base, adapter = frozen[name]["base_module"], params[name]
        if base["kernel"].dtype == jnp.int8:
            made = (x @ base["kernel"].astype(x.dtype)) * base["scale"]
        else:
            made = x @ base["kernel"].astype(x.dtype) + base["bias"].astype(x.dtype)
        return made + x @ adapter["lora_a"] @ adapter["lora_b"]

    found = layer("out", jnp.tanh(layer("up", jnp.asarray(batch["x"]))))
    return jnp.mean((found - batch["y"]) ** 2)


@functools.cache
def plain_run(dtype: Any) -> tuple[list[float], dict]:
    """Losses and adapters of a loop of optax on one device."""
    state = jax.device_get(make_engine(0, jaxpar.MeshShape(data=1), dtype).state)
    params, moments = state.params, ADAM.init(state.params)
    losses = []
    for batch in batches():
        loss, grads = jax.value_and_grad(plain_loss)(params, state.frozen, batch)
        updates, moments = ADAM.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, tree.named_leaves(params)


def trained(engine: jaxpar.Engine) -> list[float]:
    return [float(engine.step(batch)["loss"]) for batch in batches()]


def check_equals_plain(engine: jaxpar.Engine, dtype: Any) -> None:
    before = jax.device_get(engine.state.frozen)
    losses, right = plain_run(dtype)
    np.testing.assert_allclose(trained(engine), losses, rtol=1e-5)
    found = tree.named_leaves(engine.state.params)
    assert sorted(found) == [
        f"{name}/lora_{letter}" for name in ("out", "up") for letter in "ab"
    ]
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, right[name], rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, engine.state.frozen, before)
    assert tree.num_elements(engine.state.opt_state[0].mu) == sum(
        leaf.size for leaf in found.values()
    )


CASES = [
    pytest.param(
        zero,
        jaxpar.MeshShape(data=4, tensor=tensor),
        dtype,
        id=f"zero{zero}-tensor{tensor}-{jnp.dtype(dtype)}",
        marks=[]
        if (zero, tensor, dtype) == (3, 2, jnp.int8)
        else [pytest.mark.thorough],
    )
    for zero, tensor, dtype in itertools.product(
        range(4), (1, 2), (jnp.bfloat16, jnp.int8)
    )
]


@pytest.mark.usefixtures("checked_losses")
@pytest.mark.parametrize(("zero", "mesh", "dtype"), CASES)
def test_adapters_train_as_with_plain_optax(zero, mesh, dtype):
    engine = make_engine(zero, mesh, dtype)
    kernel = engine.state.frozen["up"]["base_module"]["kernel"]
    assert kernel.dtype == dtype
    ways = (mesh.data if zero else 1) * mesh.tensor
    assert kernel.addressable_shards[0].data.size * ways == kernel.size
    check_equals_plain(engine, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize(
    "mesh", [jaxpar.MeshShape(data=2, replica=2), jaxpar.MeshShape(data=1)], ids=str
)
def test_micro_batches_and_replicas_change_nothing(zero, mesh):
    check_equals_plain(make_engine(zero, mesh, accumulate=2), jnp.bfloat16)


@pytest.mark.thorough
def test_patterns_choose_as_types_do():
    engine = make_engine(3, trainable=["*/lora_a", "*/lora_b"])
    check_equals_plain(engine, jnp.bfloat16)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 3])
def test_coupled_losses_see_the_frozen_leaves_too(zero):
    check_equals_plain(make_engine(zero, coupled_batch=True), jnp.bfloat16)


def test_bytes_are_the_bases_own_divided_by_the_devices():
    """explain() says two bytes a parameter of the base over the devices; the compiled
    step moves no gradient of it, and keeps to its closed form."""
    wide = {"trainable": ["*/lora_*"], "mesh": jaxpar.MeshShape(data=8)}
    for zero in (1, 2, 3):
        engine = make_engine(zero, **wide)
        rows = {row.name: row for row in engine.explain().leaves}
        for name in ("up", "out"):
            row = rows[f"frozen/{name}/base_module/kernel"]
            size = engine.state.frozen[name]["base_module"]["kernel"].size
            assert row.bytes_per_device == 2 * size // 8
            assert row.why == "zero: data splits dim 0"
        engine.verify()


def test_checkpoint_moves_between_stages_and_keeps_the_base(tmp_path):
    engine = make_engine(3)
    losses = trained(engine)
    engine.save(tmp_path / "run")
    engine.wait()
    other = make_engine(1, jaxpar.MeshShape(data=2, tensor=2))
    assert other.restore(tmp_path / "run") == STEPS
    for name, leaf in tree.named_leaves(engine.state.weights).items():
        found = tree.named_leaves(other.state.weights)[name]
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(leaf))
    after = [float(each.step(batches()[0])["loss"]) for each in (engine, other)]
    np.testing.assert_allclose(after[0], after[1], rtol=1e-5)
    assert after[0] < losses[0]


@pytest.mark.thorough
def test_base_trained_by_another_run_is_read_in_the_frozen_dtype(tmp_path):
    """Pre-trained in fp32 with everything trained, then frozen in bf16; and back."""
    whole = make_engine(1, dtype=jnp.float32, trainable=None)
    trained(whole)
    whole.save(tmp_path / "whole")
    whole.wait()
    tuned = make_engine(3)
    tuned.restore(tmp_path / "whole", only=["frozen/*"])
    kernels = [
        tree.named_leaves(x)["up/base_module/kernel"]
        for x in (whole.state.params, tuned.state.frozen)
    ]
    assert kernels[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(kernels[1]), np.asarray(kernels[0].astype(jnp.bfloat16))
    )
    tuned.save(tmp_path / "tuned")
    tuned.wait()
    back = make_engine(1, dtype=jnp.float32, trainable=None)
    back.restore(tmp_path / "tuned", only=["params/*"])
    for name, leaf in tree.named_leaves(tree.merged(*tuned.state.weights)).items():
        found = tree.named_leaves(back.state.params)[name]
        np.testing.assert_array_equal(
            np.asarray(found), np.asarray(leaf.astype(jnp.float32))
        )


def test_adapters_are_exported_alone_and_all_weights_together(tmp_path):
    from safetensors.numpy import load_file  # noqa: PLC0415 - where it is used

    engine = make_engine(1)
    engine.save(tmp_path / "run")
    engine.wait()

    def exported(name: str, **options: Any) -> dict[str, np.ndarray]:
        (file,) = export(tmp_path / "run", tmp_path / name, **options)
        assert isinstance(file, Path)
        return load_file(file)

    adapters = exported("adapters", only="adapters")
    assert sorted(adapters) == ["out.lora_a", "out.lora_b", "up.lora_a", "up.lora_b"]
    weights = exported("all")
    assert sorted(weights) == sorted(
        name.replace("/", ".")
        for name in tree.named_leaves(tree.merged(*engine.state.weights))
    )
    plain = make_engine(1, trainable=None)
    plain.save(tmp_path / "plain")
    plain.wait()
    with pytest.raises(ValueError, match="has no frozen parameters, so it has no adap"):
        export(tmp_path / "plain", tmp_path / "none", only="adapters")


def test_whole_model_is_loaded_and_so_are_adapters_alone():
    engine = make_engine(3)
    whole = tree.merged(*jax.device_get(engine.state.weights))
    changed = jax.tree.map(lambda x: np.asarray(x, np.float32) + 1, whole)
    engine.load_params(changed)
    kernel = engine.state.frozen["up"]["base_module"]["kernel"]
    right = changed["up"]["base_module"]["kernel"]
    np.testing.assert_array_equal(
        np.asarray(kernel), np.asarray(jnp.asarray(right, jnp.bfloat16))
    )
    adapters = jax.tree.map(lambda x: x * 2, jax.device_get(engine.state.params))
    engine.load_params(adapters)
    found = engine.state.frozen["up"]["base_module"]["kernel"]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(kernel))
    jax.tree.map(np.testing.assert_array_equal, engine.state.params, adapters)
    del changed["up"]["base_module"]["bias"]
    with pytest.raises(ValueError, match=r"missing \['up/base_module/bias'\]"):
        engine.load_params(changed)


def test_model_and_evaluation_have_all_weights():
    engine = make_engine(3)
    batch = batches()[1]
    weights = jax.device_get(engine.state.weights)
    right = float(plain_loss(*weights, batch))
    assert float(engine.evaluate(batch)["loss"]) == pytest.approx(right, rel=1e-5)
    model = engine.model()
    assert float(loss_fn(model, batch)) == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            optax.masked(
                optax.adam(1e-2),
                {
                    name: {
                        "base_module": {"kernel": False, "bias": False},
                        "lora_a": True,
                        "lora_b": True,
                    }
                    for name in ("up", "out")
                },
            ),
            "optimizer: its init fails on the trainable parameters alone",
        )
    ],
)
def test_optimizer_that_masks_frozen_leaves_too_is_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        jaxpar.initialize(
            model=lambda rngs: Net(jnp.bfloat16, rngs),
            loss_fn=loss_fn,
            optimizer=optimizer,
            sample_batch=batches()[0],
            trainable=nnx.LoRAParam,
        )


def test_large_variables_that_are_no_parameters_are_named():
    class Tabled(nnx.Module):
        def __init__(self, rows: int, rngs: nnx.Rngs):
            self.table = nnx.Variable(jnp.ones((rows, 512)))
            self.out = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(x) * self.table[0, 0]

    def remarks(rows: int) -> str:
        engine = jaxpar.initialize(
            model=functools.partial(Tabled, rows),
            loss_fn=loss_fn,
            optimizer=ADAM,
            sample_batch=batches()[0],
        )
        return "\n".join(engine.spec.remarks)

    assert "model_state" not in remarks(rows=8)
    right = r"^model_state: every device holds all of table \(2\.1 MB in all\), which"
    assert re.search(right, remarks(rows=1024), re.MULTILINE)
