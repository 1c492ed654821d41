"""When is a loss compared with that of its halves, and what does a difference say?

The values come from NumPy in place of a compiled program.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.step import loss_check
from jaxpar.step.inputs import OnePack, Replicated, make_inputs
from jaxpar.step.loss import Sums
from jaxpar.step.loss_check import LossCheck, compared, mixed_rows, why_not, with_noise
from jaxpar.step.state import TrainState
from jaxpar.step.weighted import Sum, Weighted

AGREE = np.array([[1.0, 2.0], [1.0, 2.0]])
SUM = np.array([[2.0, 4.0], [1.0, 2.0]])
PADDED = np.array([[1.0, 2.0], [1.0, 2.5]])


class Queue:
    waited = 0

    def finish_before_others(self) -> None:
        self.waited += 1


class Comparing:
    """A compare function that returns what it is given, by its call."""

    def __init__(self, *found: Any):
        self.found, self.noises = found, []

    def __call__(self, *given: Any) -> dict[str, np.ndarray]:
        number = min(len(self.noises), len(self.found) - 1)
        self.noises.append(given[-1])
        found = self.found[number]
        return found if isinstance(found, dict) else {"loss": found}


def call(check: LossCheck, queue: Queue | None = None) -> None:
    state = TrainState(0, {}, {}, {}, (), jax.random.key(0), {})
    check.before_call(lambda: state, {}, queue or Queue())


def make_check(*found: Any, whole: Any = None) -> tuple[LossCheck, Comparing]:
    compare = Comparing(*found)
    return LossCheck("loss_fn", compare, whole, 1e-4), compare


def test_calls_that_are_powers_of_two_are_checked_after_the_queue():
    (check, compare), queue = make_check(AGREE), Queue()
    checked = []
    for number in range(1, 20):
        before = len(compare.noises)
        call(check, queue)
        if len(compare.noises) > before:
            checked.append(number)
    assert checked == [1, 2, 4, 8, 16]
    assert queue.waited == len(checked)


def test_difference_within_the_tolerance_is_none():
    call(make_check(AGREE * [[1], [1 + 9e-5]])[0])
    with pytest.raises(ValueError, match="the loss is not a mean"):
        call(make_check(AGREE * [[1], [1 + 11e-5]])[0])


@pytest.mark.parametrize(
    ("found", "numbers", "cause"),
    [
        (SUM, "it is 4, but its average over the two is 2", "It looks like a sum over"),
        (
            PADDED,
            "it is 2, but its average over the two is 2.5",
            "It looks like a mean",
        ),
    ],
)
def test_loss_that_differs_raises_with_its_numbers_and_the_cause(found, numbers, cause):
    check, compare = make_check(found)
    with pytest.raises(
        ValueError, match=f"^loss_fn: .*{numbers}.* {cause}.* return jax"
    ):
        call(check)
    assert compare.noises == [0.1, -0.1]


def test_refused_loss_is_checked_again_at_the_next_call():
    check, compare = make_check(SUM)
    for _ in range(3):
        with pytest.raises(ValueError, match="not a mean"):
            call(check)
    assert len(compare.noises) == 6


def test_refusal_shows_the_loss_of_the_full_batch():
    check, _ = make_check(SUM, whole=lambda *given: {"loss": np.array([6.0, 24.0])})
    message = "full batch is 24, but the engine would train on 6"
    with pytest.raises(ValueError, match=message):
        call(check)


def test_difference_that_other_noise_does_not_show_is_rounding():
    check, compare = make_check(SUM, AGREE)
    call(check)
    assert compare.noises == [0.1, -0.1]


@pytest.mark.parametrize(("last", "is_refused"), [(SUM, True), (AGREE, False)])
def test_noise_that_leaves_the_losss_domain_is_left_out(last, is_refused):
    check, compare = make_check(np.full((2, 2), np.nan), SUM, last)
    if is_refused:
        with pytest.raises(ValueError, match="not a mean"):
            call(check)
    else:
        call(check)
    assert compare.noises == [0.1, -0.1, 0.0]


def test_halves_that_are_not_finite_differ():
    with pytest.raises(ValueError, match="its average over the two is inf"):
        call(make_check(np.array([[1.0, 2.0], [1.0, np.inf]]))[0])


def test_metric_that_differs_warns_once_and_says_what_to_return():
    found = {"loss": AGREE, "count": SUM, "top": PADDED}
    check, _ = make_check(found)
    with pytest.warns(UserWarning, match="is not a mean") as caught:
        call(check)
    texts = [str(warning.message) for warning in caught]
    assert "loss_fn: metric 'count' is not a mean" in texts[0]
    assert "return jaxpar.Sum(count)" in texts[0]
    assert "metric 'top'" in texts[1]
    assert "jaxpar.Max(x)" in texts[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(check)


@pytest.mark.parametrize(
    ("accumulate", "own", "other"),
    [(1, [0, 1], [0, 1]), (2, [0], [1])],
)
def test_rows_are_interleaved_with_those_of_another_shard(accumulate, own, other):
    x = np.arange(4.0)
    inputs = make_inputs({"x": jnp.asarray(x), "w": Replicated(3.0)}, 0)
    mixed = mixed_rows(inputs, accumulate, lambda rows: rows + 100)
    right = np.stack([x[own], x[other] + 100], 1).ravel()
    np.testing.assert_array_equal(mixed.batch["x"], right)
    assert mixed.batch["w"].value == 3.0


def test_neighbour_is_the_shard_half_the_axis_away():
    mesh = make_mesh(MeshShape(data=4), jax.devices()[:4])
    given = {"in_specs": P("data"), "out_specs": P("data")}
    fn = jax.shard_map(loss_check.another_shard, mesh=mesh, **given)
    np.testing.assert_array_equal(jax.jit(fn)(np.arange(4)), [2, 3, 0, 1])


def sums_of(inputs: Any, parts: int) -> Sums:
    """A sum for a mean, with a metric that is one and one that need not be."""
    halves = np.split(np.asarray(inputs.batch["x"]), parts)
    total = np.mean([half.sum() for half in halves])
    mean = Weighted(jnp.float32(np.mean(inputs.batch["x"])), jnp.float32(1))
    loss = Weighted(jnp.float32(total), jnp.float32(1))
    return Sums(loss, {"mean": mean, "n": Sum(jnp.float32(parts))})


def test_values_of_rows_and_halves_are_compared_for_means_alone():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    inputs = make_inputs({"x": jnp.asarray(x)}, 0)
    got = compared(sums_of, inputs, 1, lambda rows: rows)
    assert set(got) == {"loss", "mean"}
    mixed = np.repeat(x[:2], 2)
    np.testing.assert_allclose(got["loss"], [[mixed.sum()], [mixed.sum() / 2]])
    np.testing.assert_allclose(got["mean"], [[mixed.mean()]] * 2)


def test_loss_that_fails_on_half_of_the_rows_says_so():
    def fixed(inputs: Any, parts: int) -> Sums:
        if parts == 2:
            raise TypeError("shapes (4,) and (2,)")
        return sums_of(inputs, parts)

    message = (
        "^loss: the check that it is a mean calls it on half of the rows, where it"
    )
    with pytest.raises(ValueError, match=message):
        compared(fixed, make_inputs({"x": jnp.ones(4)}, 0), 1, lambda rows: rows)


def test_noise_has_its_amount_of_the_leafs_size_and_is_the_same_every_time():
    params = {
        "b": jnp.zeros(4096),
        "w": jnp.full((64, 64), 3.0, jnp.bfloat16),
        "z": jnp.zeros((64, 64)),  # As a head that starts at zero.
    }
    noise = jax.jit(with_noise)
    noisy = noise(params, jnp.float32(0.1))
    for name, size in (("b", 0.3), ("w", 3.0), ("z", 64**-0.5)):
        moved = np.asarray(noisy[name]) - np.asarray(params[name], np.float32)
        assert noisy[name].dtype == jnp.float32
        assert np.sqrt(np.mean(moved**2)) == pytest.approx(0.1 * size, rel=0.05)
        assert abs(moved.mean()) < 0.01 * size
    again = noise(params, jnp.float32(0.1))
    np.testing.assert_array_equal(again["w"], noisy["w"])
    still = noise(params, jnp.float32(0.0))
    np.testing.assert_array_equal(still["w"], np.full((64, 64), 3.0))


ROWS = make_inputs({"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)}, 0)
CHECKED = {"coupled": False, "splits": 8, "asked": True}


@pytest.mark.parametrize(
    ("rows", "change", "reason"),
    [
        (ROWS, {}, None),
        (ROWS, {"asked": False}, "check_loss=False"),
        (make_inputs(OnePack({}), 0), {}, "it is called with one pack at a time"),
        (ROWS, {"coupled": True}, "it couples examples and sees full micro-batches"),
        (ROWS, {"splits": 1}, "it sees the full batch"),
    ],
)
def test_reason_not_to_check_is_the_first_that_holds(rows, change, reason):
    mesh = make_mesh(MeshShape(data=8))
    assert why_not((), rows, mesh, **(CHECKED | change)) == reason


def test_devices_that_are_not_present_check_nothing(monkeypatch):
    monkeypatch.setattr(loss_check, "are_present", lambda mesh: False)
    reason = why_not((), ROWS, make_mesh(MeshShape(data=8)), **CHECKED)
    assert reason == "the mesh's devices are compile-only"
