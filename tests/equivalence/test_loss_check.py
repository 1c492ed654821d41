"""Is a loss that the engine would train as another one refused, and no other?

The oracle is the loss function itself on the whole batch, on one device.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine.run_ahead import RunAhead
from jaxpar.step.loss_check import LossCheck

pytestmark = pytest.mark.usefixtures("checked_losses")

ROWS = 16
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, 6, 4)).astype(np.float32),
    "y": RNG.integers(0, 8, size=(ROWS, 6)).astype(np.int32),
    "mask": (RNG.random((ROWS, 6)) < 0.6).astype(np.float32),
    "label": RNG.normal(size=ROWS).astype(np.float32),
}


class Net(nnx.Module):
    """Its head is zero at the start, so that every row's loss is the same."""

    def __init__(self, rngs: nnx.Rngs, *, drop: float = 0.0):
        self.body = nnx.Linear(4, 8, rngs=rngs)
        self.drop = nnx.Dropout(drop, rngs=rngs)
        zeros = nnx.initializers.zeros
        self.head = nnx.Linear(8, 8, rngs=rngs, kernel_init=zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.drop(jnp.tanh(self.body(x))))


def token_losses(model: Any, batch: dict) -> jax.Array:
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def mean(model: Any, batch: dict) -> jax.Array:
    return token_losses(model, batch).mean()


def total(model: Any, batch: dict) -> jax.Array:
    return token_losses(model, batch).sum()


def total_by_constant(model: Any, batch: dict) -> jax.Array:
    return token_losses(model, batch).sum() / 16


def masked(model: Any, batch: dict) -> jax.Array:
    losses = token_losses(model, batch) * batch["mask"]
    return losses.sum() / batch["mask"].sum()


def weighted(model: Any, batch: dict) -> jaxpar.Weighted:
    losses = token_losses(model, batch) * batch["mask"]
    return jaxpar.Weighted(losses.sum(), batch["mask"].sum())


def negatives(model: Any, batch: dict) -> jax.Array:
    out = model(batch["x"]).mean(1)
    scores = out @ jnp.roll(out, 1, axis=1).T
    own = jnp.arange(len(out))
    return optax.softmax_cross_entropy_with_integer_labels(scores, own).mean()


def normalised(model: Any, batch: dict) -> jax.Array:
    advantage = batch["label"] - batch["label"].mean()
    advantage = advantage / (batch["label"].std() + 1e-8)
    return -(jnp.exp(model(batch["x"])[:, 0, 0]) * advantage).mean()


def largest(model: Any, batch: dict) -> jax.Array:
    return token_losses(model, batch).max()


def noisy(model: Any, batch: dict, key: jax.Array) -> jax.Array:
    noise = jax.random.normal(key, batch["x"].shape)
    noise += jax.random.normal(jax.random.key(3), batch["x"].shape)
    return mean(model, {**batch, "x": batch["x"] + noise})


def mixed_up(model: Any, batch: dict, key: jax.Array) -> jax.Array:
    """Mixup: each row is mixed with another of its micro-batch."""
    other = jax.random.permutation(key, len(batch["x"]))
    mixed = {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][other]}
    return 0.7 * mean(model, mixed) + 0.3 * mean(
        model, {**mixed, "y": batch["y"][other]}
    )


def drawn_rows(model: Any, batch: dict, key: jax.Array) -> jax.Array:
    """A bootstrap: rows of its micro-batch, drawn with replacement."""
    rows = jax.random.randint(key, (len(batch["x"]),), 0, len(batch["x"]))
    return mean(model, jax.tree.map(lambda x: x[rows], batch))


def scanned(model: Any, batch: dict, key: jax.Array) -> jax.Array:
    """Row after row, each with noise from a key that the last one left."""

    def one(key: jax.Array, row: dict) -> tuple[jax.Array, jax.Array]:
        key, own = jax.random.split(key)
        noise = jax.random.normal(own, row["x"].shape)
        return key, mean(model, {**row, "x": row["x"] + noise})

    return jax.lax.scan(one, key, batch)[1].mean()


def drawn_flat(model: Any, batch: dict, key: jax.Array) -> jax.Array:
    """Draws whose rows are proved of two rows, and not of one."""
    x = batch["x"]
    noise = jax.random.normal(key, x.shape if len(x) > 1 else (x.size,))
    return mean(model, {**batch, "x": x + noise.reshape(x.shape)})


def beta_weighted(model: Any, batch: dict, key: jax.Array) -> jax.Array:
    return mean(model, batch) * jax.random.beta(key, 2.0, 2.0)


def make_engine(loss_fn: Any, **change: Any) -> jaxpar.Engine:
    given: dict[str, Any] = {
        "model": lambda rngs: Net(rngs),
        "optimizer": optax.sgd(0.05),
        "sample_batch": BATCH,
        "mesh": jaxpar.MeshShape(data=8),
    }
    return jaxpar.initialize(loss_fn=loss_fn, **given | change)


REFUSED = {
    "sum": (total, "It looks like a sum over the rows"),
    "sum by a constant": (total_by_constant, "It looks like a sum over the rows"),
    "mask": (masked, "It looks like a mean over unequal weights"),
    "negatives": (negatives, ", or a loss that couples"),
    "normalised by the batch": (normalised, ", or a loss that couples"),
    "largest": (largest, ", or a loss that couples"),
    "mixup": (mixed_up, ", or a loss that couples"),
    "bootstrap": (drawn_rows, ", or a loss that couples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_loss_that_is_no_mean_over_rows_is_refused(case: str) -> None:
    loss_fn, cause = REFUSED[case]
    engine = make_engine(loss_fn)
    before = jax.device_get(engine.state.params)
    with pytest.raises(ValueError, match="the loss is not a mean over the rows"):
        engine.step(BATCH)
    with pytest.raises(ValueError, match="the loss is not a mean over the rows") as e:
        engine.step(BATCH)  # It is not waved through the second time.
    assert cause in str(e.value)
    for way in (".mean()", "jaxpar.Weighted", "coupled_batch=True", "check_loss=False"):
        assert way in str(e.value)
    jax.tree.map(np.testing.assert_array_equal, engine.state.params, before)
    assert engine.steps == 0


def numbers_in(text: str) -> list[float]:
    words = text.replace(". ", " ").replace(",", " ").rstrip(".").split()
    return [float(w) for w in words if w.replace(".", "").replace("-", "").isdigit()]


def test_refusal_shows_the_number_of_the_whole_batch() -> None:
    engine = make_engine(total, zero=3)
    with pytest.raises(ValueError, match="The loss of the full batch is") as caught:
        engine.step(BATCH)
    text = str(caught.value).split("of the full batch")[1].split("It looks")[0]
    whole, ours = numbers_in(text)
    assert whole == pytest.approx(8 * ours, rel=1e-5), "a sum over eight shards"


def of_half(model: Any, batch: dict) -> jax.Array:
    """As cuDNN's attention, which has no fp32."""
    if model.body.kernel.get_value().dtype == jnp.float32:
        raise NotImplementedError("Q must be fp16 or bf16")
    return mean(model, batch)


def total_of_half(model: Any, batch: dict) -> jax.Array:
    return of_half(model, batch) * len(batch["x"])


ROOM = {
    "mean": {"loss_fn": mean},
    "weighted": {"loss_fn": weighted, "zero": 2},
    "dropout": {"loss_fn": mean, "model": lambda rngs: Net(rngs, drop=0.5)},
    "noise": {"loss_fn": noisy, "zero": 3},
    "noise of a scan over rows": {"loss_fn": scanned},
    "a number by rejection": {"loss_fn": beta_weighted},
    "noise whose rows are not always proved": {"loss_fn": drawn_flat},
    "coupled": {"loss_fn": negatives, "coupled_batch": True},
    "asked not to": {"loss_fn": masked, "check_loss": False},
    "one row a shard, and accumulate": {"loss_fn": mean, "accumulate": 2},
    "one device": {"loss_fn": total, "mesh": jaxpar.MeshShape(data=1)},
    "bf16": {"loss_fn": mean, "precision": "bf16"},
    "bf16, and no kernel for fp32": {"loss_fn": of_half, "precision": "bf16"},
    "bf16, one row": {"loss_fn": mean, "precision": "bf16", "accumulate": 2},
}


@pytest.mark.filterwarnings("ignore:.*uses the first:UserWarning")
@pytest.mark.parametrize("case", ROOM)
def test_other_losses_are_no_false_alarm(case: str) -> None:
    engine = make_engine(**ROOM[case])
    for _ in range(4):
        engine.step(BATCH)
    engine.wait()


@pytest.mark.parametrize("rows", [8, 24])
def test_one_and_three_rows_a_shard_are_checked(rows: int) -> None:
    batch = jax.tree.map(lambda x: np.concatenate([x, x])[:rows], BATCH)
    make_engine(mean, sample_batch=batch).step(batch)
    with pytest.raises(ValueError, match="It looks like a mean over unequal"):
        make_engine(masked, sample_batch=batch).step(batch)


@pytest.mark.parametrize("case", ["one device that accumulates", "bf16 alone"])
def test_sum_is_refused_on(case: str) -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=1), jax.devices()[:1])
    given = {"loss_fn": total, "mesh": mesh, "accumulate": 2}
    if case == "bf16 alone":
        given = {"loss_fn": total_of_half, "precision": "bf16"}
    with pytest.raises(ValueError, match="It looks like a sum over the rows"):
        make_engine(**given).step(BATCH)


def test_padding_that_first_appears_later_is_found() -> None:
    engine = make_engine(masked)
    full = {**BATCH, "mask": np.ones_like(BATCH["mask"])}
    for _ in range(3):
        engine.step(full)
    with pytest.raises(ValueError, match="It looks like a mean over unequal"):
        engine.step(BATCH)
    assert engine.steps == 3


PADDINGS = {
    "the last shards": np.arange(ROWS) < 10,
    "rows sorted by length": np.arange(6) <= np.arange(ROWS)[:, None] // 3,
    "every shard's last row": np.arange(ROWS) % 2 == 0,
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("case", PADDINGS)
def test_padding_that_is_even_in_a_shard_is_found(case: str, accumulate: int) -> None:
    mask = np.ones((ROWS, 6), np.float32) * PADDINGS[case].reshape(ROWS, -1)
    batch = {**BATCH, "mask": mask}

    def masked(model: Any, batch: dict) -> jax.Array:
        losses = token_losses(model, batch) * batch["mask"]
        return losses.sum() / jnp.maximum(batch["mask"].sum(), 1)

    engine = make_engine(masked, accumulate=accumulate)
    if case == "every shard's last row" and accumulate == 1:
        engine.step(batch)  # Every shard's mean has the same weight.
    else:
        with pytest.raises(ValueError, match=r"unequal weights|half of them have no"):
            engine.step(batch)


def test_loss_that_fails_on_half_the_rows_says_so() -> None:
    def of_two(model: Any, batch: dict) -> jax.Array:
        return token_losses(model, batch).reshape(2, 6).mean()

    engine = make_engine(of_two)
    with pytest.raises(ValueError, match=r"it on half of the rows, where it fails"):
        engine.step(BATCH)
    make_engine(of_two, check_loss=False).step(BATCH)


def test_the_pure_step_is_checked_too() -> None:
    with pytest.raises(ValueError, match="It looks like a sum over the rows"):
        (engine := make_engine(total)).train_step(engine.state, BATCH)


def test_noise_that_leaves_the_losss_domain_is_left_out() -> None:
    def barrier(model: Any, batch: dict) -> jax.Array:
        return total(model, batch) - jnp.log(model.body.bias - 1e-3 + 0.01).sum()

    engine = make_engine(barrier)
    with pytest.raises(ValueError, match="the loss is not a mean over the rows"):
        engine.step(BATCH)


@pytest.mark.usefixtures("unchecked_types")
def test_loss_is_refused_only_if_it_differs_with_other_noise_too() -> None:
    """Near zero by cancellation, as policy gradients are, it differs by rounding."""
    state = make_engine(mean, check_loss=False)._packed

    def check(*numbers: list[float]) -> None:
        found = iter({"loss": np.array(pair)[:, None]} for pair in numbers)
        made = LossCheck("loss_fn", lambda *_: next(found), None, 1e-4)
        made.before_call(lambda: state, BATCH, RunAhead())

    check([1e-5, 3e-5], [0.2, 0.2])
    check([math.nan, math.nan], [0.2, 0.2])
    message = r"together it is 0\.2, but its average over the two is 0\.3"
    with pytest.raises(ValueError, match=message):
        check([1e-5, 3e-5], [0.2, 0.3])
    message = r"together it is 0\.4, but its average over the two is 0\.2"
    with pytest.raises(ValueError, match=message):
        check([math.nan, math.nan], [0.2, 0.1], [0.4, 0.2])


def test_loss_of_evaluation_is_checked_too() -> None:
    engine = make_engine(mean, eval_fn=total)
    assert "eval_fn: checked to be a mean over rows" in str(engine.explain())
    engine.step(BATCH)
    with pytest.raises(ValueError, match=r"eval_fn: the loss.*sum over the rows"):
        engine.evaluate(BATCH)


def test_coupled_mixup_is_one_devices() -> None:
    found = []
    for devices in (jax.devices(), jax.devices()[:1]):
        mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=len(devices)), devices)
        engine = make_engine(mixed_up, coupled_batch=True, mesh=mesh)
        found.append([float(engine.step(BATCH)["loss"]) for _ in range(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def with_metrics(model: Any, batch: dict) -> tuple[jax.Array, dict]:
    losses = token_losses(model, batch)
    return losses.mean(), {
        "right": jnp.mean(losses < 2),
        "count": (losses < 2).sum(),
        "perplexity": jnp.exp(losses.mean()),
        "declared": jaxpar.Sum((losses < 2).sum()),
        "top": jaxpar.Max(losses.max()),
    }


def test_metric_that_is_no_mean_warns_once_and_says_what_to_return() -> None:
    engine = make_engine(with_metrics)
    with pytest.warns(UserWarning, match="metric") as caught:
        engine.step(BATCH)
    said = sorted(str(w.message) for w in caught)
    assert ["metric 'count'" in said[0], "metric 'perplexity'" in said[1]] == [True] * 2
    assert len(said) == 2
    assert "return jaxpar.Sum(count)" in said[0]
    assert "such as exp(loss), from the mean" in said[1]
    engine.step(BATCH)


def pipeline(loss_fn: Any) -> jaxpar.Engine:
    model = jaxpar.PipelineModel(
        embed=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        sections=[(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 2)],
        head=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
    )
    mesh = jaxpar.MeshShape(data=2, pipe=2, tensor=2)
    return make_engine(loss_fn, model=model, mesh=mesh, accumulate=2)


def test_loss_of_a_pipeline_is_checked_too() -> None:
    engine = pipeline(weighted)
    for _ in range(2):
        engine.step(BATCH)
    with pytest.raises(ValueError, match="It looks like a mean over unequal"):
        pipeline(masked).step(BATCH)
