"""Is a loss that the engine would train as another one refused, and no other?

The oracle is the loss function itself on the whole batch, on one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.models import GPT, GPTConfig

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
    "negatives": (negatives, "examples that are coupled"),
    "normalised by the batch": (normalised, "examples that are coupled"),
    "largest": (largest, "examples that are coupled"),
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
    with pytest.raises(ValueError, match="Of the whole batch it is") as caught:
        engine.step(BATCH)
    text = str(caught.value).split("Of the whole batch")[1].split("It looks")[0]
    whole, ours = numbers_in(text)
    assert whole == pytest.approx(8 * ours, rel=1e-5), "a sum over eight shards"


ROOM = {
    "mean": {"loss_fn": mean},
    "weighted": {"loss_fn": weighted, "zero": 2},
    "dropout": {"loss_fn": mean, "model": lambda rngs: Net(rngs, drop=0.5)},
    "noise": {"loss_fn": noisy, "zero": 3},
    "coupled": {"loss_fn": negatives, "coupled_batch": True},
    "asked not to": {"loss_fn": masked, "check_loss": False},
    "one row a shard, and accumulate": {
        "loss_fn": mean,
        "accumulate": 2,
        "mesh": jaxpar.MeshShape(data=8),
    },
    "one device": {"loss_fn": total, "mesh": jaxpar.MeshShape(data=1)},
    "bf16": {"loss_fn": mean, "precision": "bf16"},
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


def test_sum_is_refused_on_one_device_that_accumulates() -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=1), jax.devices()[:1])
    with pytest.raises(ValueError, match="It looks like a sum over the rows"):
        make_engine(total, mesh=mesh, accumulate=2).step(BATCH)


def test_padding_that_first_appears_later_is_found() -> None:
    engine = make_engine(masked)
    full = {**BATCH, "mask": np.ones_like(BATCH["mask"])}
    for _ in range(3):
        engine.step(full)
    with pytest.raises(ValueError, match="It looks like a mean over unequal"):
        engine.step(BATCH)
    assert engine.steps == 3


def test_loss_that_fails_on_half_the_rows_says_so() -> None:
    def of_two(model: Any, batch: dict) -> jax.Array:
        return token_losses(model, batch).reshape(2, 6).mean()

    engine = make_engine(of_two)
    with pytest.raises(ValueError, match=r"on half of the rows, for it fails on them"):
        engine.step(BATCH)
    make_engine(of_two, check_loss=False).step(BATCH)


def test_the_pure_step_is_checked_too() -> None:
    engine = make_engine(total)
    with pytest.raises(ValueError, match="It looks like a sum over the rows"):
        engine.train_step(engine.state, BATCH)


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
    assert "such as exp(loss), take of the mean" in said[1]
    engine.step(BATCH)


def pipeline(loss_fn: Any) -> jaxpar.Engine:
    model = jaxpar.PipelineModel(
        embed=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        block=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        num_blocks=2,
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


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_check_needs_no_more_memory_than_the_step(zero: int) -> None:
    config = GPTConfig(vocab_size=256, seq_len=64, num_layers=4, num_heads=4, width=128)
    tokens = RNG.integers(0, 256, size=(32, 64)).astype(np.int32)

    def loss_fn(model: Any, batch: dict) -> jax.Array:
        logits = model(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits, batch["tokens"]).mean()

    engine = make_engine(
        loss_fn,
        model=lambda rngs: GPT(config, rngs=rngs),
        sample_batch={"tokens": tokens},
        optimizer=optax.adamw(1e-3),
        zero=zero,
    )
    check: Any = engine._program.loss_check
    kept = engine._kept
    placed = engine.batch_spec.put({"tokens": tokens})
    given = (kept.params, kept.model_state, placed, kept.step, kept.key)
    compared = check._compare.lower(*given).compile().memory_analysis()
    step = engine.lower().compile().memory_analysis()
    opt_state = sum(x.nbytes for x in jax.tree.leaves(engine.state.opt_state))
    held = opt_state / (1 if zero == 0 else 8)  # While the check runs as well.
    assert total_of(compared) + held <= total_of(step)


def total_of(memory: Any) -> int:
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes
