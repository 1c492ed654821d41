"""Is the noise scale that of a loss whose gradients' noise is known?"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import models
from jaxpar.data import batch_shapes
from jaxpar.training.gradient_noise import GradientNoise, NoiseScale, noise_scale
from jaxpar.training.loop import train
from jaxpar.training.metrics import read_metrics
from tests.runs import ROWS, RULES, Data, fresh, run_in

WIDTH, START = 8, 2.0
DEVIATIONS = np.linspace(0.5, 4.0, WIDTH)


class Point(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.place = nnx.Param(jnp.full(WIDTH, START))


def half_square(model: Point, batch: dict) -> jax.Array:
    """A row's gradient is the point less the row's own."""
    return 0.5 * ((model.place[...] - batch["x"]) ** 2).sum(axis=1).mean()


def weighted(model: Point, batch: dict) -> Any:
    losses = 0.5 * ((model.place[...] - batch["x"]) ** 2).sum(axis=1)
    return jaxpar.Weighted(losses.sum(), jnp.float32(len(losses)))


def make_engine(rows: int, zero: int = 0, **options: Any) -> jaxpar.Engine:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=4), jax.devices()[:4])
    rows_of_x = {"x": jax.ShapeDtypeStruct((rows, WIDTH), np.float32)}
    given = {"loss_fn": half_square, "sample_batch": rows_of_x} | options
    return jaxpar.initialize(
        model=Point,
        optimizer=optax.adam(0.1),
        mesh=mesh,
        zero=zero,
        **given,
    )


def draw(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed).normal(size=(rows, WIDTH))
    return {"x": (noise * DEVIATIONS).astype(np.float32)}


def test_known_noise_scale_is_found() -> None:
    """|G|^2 is 8 * 2^2, tr(S) the sum of the variances."""
    batches = [draw(4096, seed) for seed in range(4)]
    found = GradientNoise(make_engine(4096), batches, microbatches=64)()
    assert found["grad_square"] == pytest.approx(WIDTH * START**2, rel=0.05)
    assert found["variance"] == pytest.approx((DEVIATIONS**2).sum(), rel=0.15)
    expected = (DEVIATIONS**2).sum() / (WIDTH * START**2)
    assert found["scale"] == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("loss", [half_square, weighted])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_estimates_are_the_variance_of_microbatch_means(
    zero: int, loss: Any, parts: int
) -> None:
    """By another formula; a micro-batch may have fewer rows than there are devices."""
    batches, rows = [draw(16, seed) for seed in (1, 2)], 16 // parts
    engine = make_engine(16, zero, loss_fn=loss)
    found = GradientNoise(engine, batches, microbatches=parts)()
    means = START - np.stack(
        [each["x"].reshape(rows, parts, WIDTH).mean(axis=0) for each in batches]
    )
    variances = rows * means.var(axis=1, ddof=1).sum(axis=1)
    squares = (means.mean(axis=1) ** 2).sum(axis=1) - variances / 16
    assert found["variance"] == pytest.approx(variances.mean(), rel=1e-4)
    assert found["grad_square"] == pytest.approx(squares.mean(), rel=1e-4)
    assert found["scale"] == pytest.approx(variances.mean() / squares.mean(), rel=1e-4)


def test_estimates_have_no_bias() -> None:
    """Expected norms at 3 and 7 rows give the numbers that they are made of."""
    square, variance = 5.0, 12.0
    found = noise_scale(
        square + variance / 3, square + variance / 7, small_rows=3, big_rows=7
    )
    assert found == pytest.approx((square, variance))


def test_gradient_that_is_not_seen_has_an_infinite_scale() -> None:
    assert NoiseScale(-0.1, 3.0).scale == math.inf


def test_run_logs_it_and_its_numbers_are_as_without(tmp_path: Any) -> None:
    """With dropout, embeddings on a tensor axis, and micro-batches of the engine."""
    ends = []
    for name in ("with", "without"):
        engine, data = fresh(), Data()
        batches = [next(data) for _ in range(2)]
        noise = {"noise": GradientNoise(engine, batches, microbatches=2)}
        given = {"steps": 4, "save_every": 4, "recovery": RULES}
        own = {"evaluate": noise, "eval_every": 2} if name == "with" else {}
        train(engine, Data(), run_in(tmp_path / name), **given, **own)
        ends.append(float(engine.evaluate(batches[0])["loss"]))
    assert ends[0] == ends[1]
    records = read_metrics(tmp_path / "with" / "metrics.jsonl")
    found = {r["step"]: r for r in records if "eval/noise/scale" in r}
    assert list(found) == [0, 2, 4]
    assert all(each["eval/noise/variance"] > 0 for each in found.values())


def test_what_is_not_computed_is_refused() -> None:
    engine = fresh()
    for wrong in (1, 3):
        with pytest.raises(
            ValueError, match=f"microbatches={wrong} must .* {ROWS} rows"
        ):
            GradientNoise(engine, [], microbatches=wrong)
    with pytest.raises(ValueError, match="batches: there is none"):
        GradientNoise(engine, [])()
    on_host = make_engine(16, 1, offload=jaxpar.Offload(optimizer="host"))
    packs = {"x": jax.ShapeDtypeStruct((16, 4, WIDTH), np.float32)}
    packed = make_engine(16, sample_batch=jaxpar.Packed(packs))
    GradientNoise(make_engine(16, 1, offload=jaxpar.Offload.nothing()), [])
    for engine, what in ((on_host, "offload"), (packed, "Packed")):
        with pytest.raises(ValueError, match=f"engine: it has .*{what}, of which"):
            GradientNoise(engine, [])


def test_pipeline_is_refused() -> None:
    model = models.PRESETS["tiny"]
    engine = jaxpar.initialize(
        model=models.make_decoder(model),
        loss_fn=models.decoder_loss,
        optimizer=optax.sgd(0.1),
        sample_batch=batch_shapes(8, model.seq_len),
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(pipe=2), jax.devices()[:2]),
        accumulate=2,
    )
    with pytest.raises(ValueError, match="engine: it has a pipeline, of which"):
        GradientNoise(engine, [])
