"""Is an evaluation of any number of rows the one of all of them on one device?

To 1e-6 relative: losses and metrics of a batch that data does not divide are sums over
other rows than one device's, and no more.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from tests.model import toys

ROWS, WIDTH = 16, 4
EXACT = 1e-6


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        named = nnx.with_partitioning(nnx.initializers.normal(0.5), ("embed", "mlp"))
        self.up = nnx.Linear(WIDTH, 16, kernel_init=named, rngs=rngs)
        self.down = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))[:, 0]


class Normed(Net):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.norm(jnp.tanh(self.up(x))))[:, 0]


def make_batch(rows: int) -> dict[str, np.ndarray]:
    """Rows that weigh differently, the last of them, which are left over, most."""
    rng = np.random.default_rng(rows)
    return {
        "x": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        "y": rng.normal(size=rows).astype(np.float32),
        "mask": np.linspace(0, 2, rows, dtype=np.float32),
    }


def errors(model: Any, batch: dict) -> jax.Array:
    return (model(batch["x"]) - batch["y"]) ** 2


def masked_loss(model: Any, batch: dict) -> tuple:
    squared, mask = errors(model, batch), batch["mask"]
    metrics = {
        "positive": (model(batch["x"]) > 0).mean(),
        "kept": jaxpar.Weighted(mask.sum(), (mask > 0).sum()),
        "rows": jaxpar.Sum(len(mask)),
        "worst": jaxpar.Max(squared.max()),
    }
    return jaxpar.Weighted((squared * mask).sum(), mask.sum()), metrics


def mean_loss(model: Any, batch: dict) -> jax.Array:
    return errors(model, batch).mean()


def coupled_loss(model: Any, batch: dict) -> jax.Array:
    """Every row is compared with the mean of all."""
    out = model(batch["x"])
    return jnp.mean((out - out.mean() - batch["y"]) ** 2)


CASES: dict[str, dict[str, Any]] = {
    "zero 3": {"mesh": {"data": 8}, "zero": 3},
    "zero 0": {"mesh": {"data": 8}, "zero": 0},
    "zero 1, mean": {"mesh": {"data": 8}, "zero": 1, "loss_fn": mean_loss},
    "zero 2, tensor": {"mesh": {"data": 4, "tensor": 2}, "zero": 2},
    "zero 3, tensor, bf16": {
        "mesh": {"data": 4, "tensor": 2},
        "zero": 3,
        "precision": "bf16",
    },
    "one shard": {"mesh": {"data": 1, "tensor": 2}, "zero": 1},
    "coupled": {
        "mesh": {"data": 4, "tensor": 2},
        "zero": 3,
        "loss_fn": coupled_loss,
        "coupled_batch": True,
    },
    "batch statistics": {"mesh": {"data": 8}, "zero": 2, "model": Normed},
}


@functools.cache
def engine_of(case: str) -> jaxpar.Engine:
    given = {"model": Net, "loss_fn": masked_loss} | CASES[case]
    sizes = given.pop("mesh")
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    engine = jaxpar.initialize(
        optimizer=optax.sgd(0.1),
        sample_batch=make_batch(ROWS),
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(**sizes), devices),
        **given,
    )
    if given["model"] is Normed:
        engine.step(make_batch(ROWS))
    return engine


def plain(case: str, batch: dict) -> dict[str, float]:
    """The loss and metrics of a batch, all on one device, in plain JAX."""
    engine, given = engine_of(case), {"loss_fn": masked_loss} | CASES[case]
    dtype = jnp.bfloat16 if "bf16" in case else jnp.float32
    state = jax.device_get((engine.state.params, engine.state.model_state))
    params, stats = jax.tree.map(lambda x: jnp.asarray(x, dtype), state)

    def model(x: jax.Array) -> jax.Array:
        up, down = params["up"], params["down"]
        x = jnp.tanh(x @ up["kernel"] + up["bias"])
        if "norm" in params:
            mean, var = stats["norm"]["mean"], stats["norm"]["var"]
            x = (x - mean) / jnp.sqrt(var + 1e-5)
            x = x * params["norm"]["scale"] + params["norm"]["bias"]
        return (x @ down["kernel"] + down["bias"])[:, 0]

    out = given["loss_fn"](model, batch)
    loss, metrics = out if isinstance(out, tuple) else (out, {})
    weight = loss.weight if isinstance(loss, jaxpar.Weighted) else len(batch["y"])
    found = {name: mean_of(x) for name, x in metrics.items()}
    return {"loss": mean_of(loss), "weight": float(weight)} | found


def mean_of(value: Any) -> float:
    if isinstance(value, jaxpar.Weighted):
        return float(value.total) / max(float(value.weight), 1e-9)
    return float(getattr(value, "value", value))


def check(case: str, rows: int) -> None:
    batch = make_batch(rows)
    metrics = engine_of(case).evaluate(batch)
    found = {name: float(value) for name, value in metrics.items()}
    assert found == pytest.approx(plain(case, batch), rel=EXACT, abs=1e-7)


@pytest.mark.parametrize("rows", [11, 3])
def test_rows_that_data_does_not_divide_are_evaluated(rows: int) -> None:
    check("zero 3", rows)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [9, 10, 12, 13, 14, 15, 1, 2, 4, 5, 6, 7, 8])
def test_every_remainder_is_evaluated(rows: int) -> None:
    check("zero 3", rows)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [11, 3, 8, 16])
@pytest.mark.parametrize("case", CASES)
def test_every_stage_and_mesh_evaluates_any_number_of_rows(
    case: str, rows: int
) -> None:
    check(case, rows)


def test_coupled_rows_stay_together() -> None:
    check("coupled", 11)


def test_a_remainder_compiles_one_program(compiled: list[str]) -> None:
    engine = engine_of("zero 3")
    for rows in (8, 16, 11):
        engine.evaluate(make_batch(rows))
    compiled.clear()
    for rows in (19, 3, 11):
        engine.evaluate(make_batch(rows))
    assert compiled == []


def test_global_arrays_of_any_number_of_rows_are_evaluated() -> None:
    batch = make_batch(11)
    found = engine_of("zero 3").evaluate(jax.tree.map(jnp.asarray, batch))
    wanted = plain("zero 3", batch)["loss"]
    assert float(found["loss"]) == pytest.approx(wanted, rel=EXACT)


@pytest.mark.slow
def test_other_parameters_are_evaluated_on_any_number_of_rows() -> None:
    engine, batch = engine_of("zero 3"), make_batch(11)
    params = jax.device_get(engine.state.params)
    found = float(engine.evaluate(batch, params=params)["loss"])
    assert found == pytest.approx(plain("zero 3", batch)["loss"], rel=EXACT)


def test_rows_without_weight_count_nothing() -> None:
    batch = make_batch(11)
    batch["mask"][:] = 0
    found = engine_of("zero 3").evaluate(batch)
    assert (float(found["loss"]), float(found["weight"])) == (0.0, 0.0)


@pytest.mark.slow
def test_noise_of_rows_left_over_is_the_same_on_every_shard() -> None:
    def noisy(model: Any, batch: dict, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, batch["y"].shape)
        return (errors(model, batch) * noise).mean()

    engine = jaxpar.initialize(
        model=Net,
        loss_fn=mean_loss,
        eval_fn=noisy,
        optimizer=optax.sgd(0.1),
        sample_batch=make_batch(ROWS),
    )
    found = [engine.evaluate(make_batch(rows))["loss"] for rows in (3, 11)]
    for loss in found:
        assert len({float(shard.data) for shard in loss.addressable_shards}) == 1


PIPES = {
    "data 2": {"mesh": {"data": 2, "pipe": 2}, "zero": 3},
    "interleaved": {"mesh": {"data": 4, "pipe": 2}, "schedule": "interleaved"},
    "coupled": {"mesh": {"data": 2, "pipe": 2}, "coupled_batch": True},
    "coupled, one shard": {"mesh": {"pipe": 2}, "coupled_batch": True},
}


def tokens_of(rows: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(rows).integers(0, toys.VOCAB, (rows, toys.LENGTH))
    return {"tokens": tokens.astype(np.int32)}


def spread_of_logits(logits: jax.Array) -> jax.Array:
    """Couples the rows: each is compared with the mean of all."""
    return jnp.mean((logits - logits.mean(0)) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 1, 8])
@pytest.mark.parametrize("case", PIPES)
def test_stages_evaluate_any_number_of_rows(case: str, rows: int) -> None:
    engine, batch = piped(case), tokens_of(rows)
    logits = toys.plain_logits(toys.params_of(engine), batch["tokens"])
    want = spread_of_logits(logits) if "coupled" in case else jnp.mean(logits**2)
    assert float(engine.evaluate(batch)["loss"]) == pytest.approx(float(want), rel=1e-5)


@functools.cache
def piped(case: str) -> jaxpar.Engine:
    change = dict(PIPES[case])
    is_coupled = "coupled" in case

    def loss_fn(model: Any, batch: dict) -> jax.Array:
        logits = model(batch["tokens"])
        return spread_of_logits(logits) if is_coupled else jnp.mean(logits**2)

    return toys.make_engine(
        toys.make_model(num_blocks=4, tied=toys.TIE),
        loss_fn=loss_fn,
        sample_batch=tokens_of(16),
        accumulate=4,
        mesh=toys.make_mesh(**change.pop("mesh")),
        **change,
    )
