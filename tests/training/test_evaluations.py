"""When is a run evaluated, and how are the numbers called?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.data import Loader, Mixture, Tokens, Windows
from jaxpar.training.evaluations import Evaluations, describe, mean_losses
from tests.runs import LENGTH, ROWS, fresh


class Guess(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.value = nnx.Param(jnp.float32(2.0))


def square_loss(model: Guess, batch: dict) -> jax.Array:
    return ((batch["tokens"] - model.value[...]) ** 2).mean()


def test_one_loss_is_the_held_out_one():
    found = Evaluations(lambda: jnp.float32(1.5), None)
    assert found.loss is None
    assert found.run() == {"eval/loss": 1.5}
    assert found.loss == 1.5


def test_numbers_and_evaluations_have_names():
    found = Evaluations(
        {"a": lambda: {"hits": 1, "loss": 2.0}, "b": lambda: 3.0, "c/d": lambda: 4},
        None,
    )
    assert found.run() == {
        "eval/a/hits": 1.0,
        "eval/a/loss": 2.0,
        "eval/b/loss": 3.0,
        "eval/c/d/loss": 4.0,
    }
    assert found.loss == 2.0, "the first one that is called so"


def test_other_numbers_are_no_loss():
    """The best checkpoint is that of the lowest loss, not of the lowest accuracy."""
    found = Evaluations(lambda: {"accuracy": 0.25, "misses": 0.75}, None)
    found.run()
    assert found.loss is None


@pytest.mark.parametrize(
    ("every", "due"),
    [(None, [4, 8, 10]), (3, [3, 6, 9, 10]), (4, [4, 8, 10])],
)
def test_due_steps(every, due):
    found = Evaluations(lambda: 1.0, every)
    steps = [
        step
        for step in range(1, 11)
        if found.is_due(step, is_saved=step in (4, 8, 10), is_last=step == 10)
    ]
    assert steps == due
    assert not Evaluations(None, None).is_due(4, is_saved=True, is_last=True)


def test_what_is_no_evaluation_is_refused():
    with pytest.raises(TypeError, match=r"evaluate\['b'\] is float, .* a function"):
        Evaluations({"a": lambda: 1.0, "b": 2.0}, None)
    with pytest.raises(TypeError, match=r"eval/a/name is str, .* a dict of numbers"):
        Evaluations({"a": lambda: {"name": "x"}}, None).run()
    with pytest.raises(ValueError, match="eval_every=0 must be at least 1"):
        Evaluations(lambda: 1.0, 0)
    with pytest.raises(ValueError, match="eval_every=5 needs evaluate="):
        Evaluations(None, 5)


def test_held_out_sets_have_their_own_losses():
    engine, rng = fresh(), np.random.default_rng(0)
    tokens = rng.integers(0, 9, (2, ROWS, LENGTH + 1), dtype=np.int32)
    batches = [{"tokens": x, "boost": np.ones(ROWS, np.float32)} for x in tokens]
    sets = {"": batches, "first": batches[:1], "second": batches[1:]}
    given = Evaluations(mean_losses(engine, sets), None)
    found = given.run()
    assert list(found) == ["eval/loss", "eval/first/loss", "eval/second/loss"]
    own = [float(engine.evaluate(batch)["loss"]) for batch in batches]
    assert own[0] != own[1]
    assert list(found.values()) == pytest.approx([np.mean(own), *own])
    assert given.loss == found["eval/loss"], "the run's own set chooses the best"
    assert describe(found).startswith(f"loss {given.loss:.6f}, first/loss ")


def test_sources_of_a_mixture_have_their_own_losses():
    """Also those with few rows in it; their shares make the mixture's loss."""
    ids = [np.arange(33) % 7, 9 + np.arange(17) % 3]
    text = [Tokens((each.astype(np.uint8),), files=("ids",)) for each in ids]
    mixture = Mixture(
        [(Windows(each, seq_len=4), w) for each, w in zip(text, (3, 1), strict=True)]
    )
    loader = Loader(mixture, batch_size=4)
    engine = jaxpar.initialize(
        model=Guess,
        loss_fn=square_loss,
        optimizer=optax.sgd(0.1),
        sample_batch=loader.sample_batch,
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=2), jax.devices()[:2]),
    )
    sets = {
        name: Loader(mixture.only(at), batch_size=4, repeat=False)
        for at, name in enumerate(("often", "seldom"))
    }
    found = Evaluations(mean_losses(engine, sets), None).run()
    windows = [np.lib.stride_tricks.sliding_window_view(each, 5)[::4] for each in ids]
    expected = [((each - 2.0) ** 2).mean() for each in windows]
    assert found == pytest.approx(
        {"eval/often/loss": expected[0], "eval/seldom/loss": expected[1]}
    )
    mixed = [next(loader) for _ in range(8)]
    shares = np.average(expected, weights=(3, 1))
    assert jaxpar.mean_loss(engine, mixed) == pytest.approx(shares)


def test_average_of_the_parameters_is_evaluated_beside_them():
    """By an evaluation of its own, which reads the average when it is called."""
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5)
    engine = jaxpar.initialize(
        model=Guess,
        loss_fn=square_loss,
        optimizer=optax.sgd(0.25),
        carried=[jaxpar.Ema(0.5)],
        sample_batch={"tokens": tokens},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=2), jax.devices()[:2]),
    )
    held = [{"tokens": tokens}]

    def average() -> float:
        own = engine.state.carried["ema"]
        return jaxpar.mean_loss(engine, held, params=own)

    given = Evaluations({**mean_losses(engine, {"": held}), "ema": average}, None)
    value = ema = 2.0
    for _ in range(3):
        engine.step({"tokens": tokens})
        value -= 0.25 * 2 * (value - tokens.mean())
        ema = 0.5 * ema + 0.5 * value
        expected = [((tokens - each) ** 2).mean() for each in (value, ema)]
        assert list(given.run().values()) == pytest.approx(expected)
    assert list(given.run()) == ["eval/loss", "eval/ema/loss"]
