"""Is a block's work counted right, and a split that gains nothing refused?"""

import jax
import pytest
from flax import nnx

from jaxpar.pipeline.block_cost import (
    check_split,
    cost_of,
    times_of,
    trace_microbatch,
)
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.step.inputs import abstract_inputs
from jaxpar.step.loss import as_losses
from tests.model import two_sections
from tests.model.toys import (
    BATCHES,
    HIDDEN,
    LENGTH,
    ROWS,
    WIDTH,
    Block,
    RecurrentBlock,
    loss_fn,
)
from tests.model.two_sections import NARROW
from tests.pipeline.parts import make_network

SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCHES[0])
TOKENS = ROWS * LENGTH


def traced(block=Block, loss=loss_fn):
    network = make_network(block=block)
    return trace_microbatch(network, as_losses(loss, None)[0], abstract_inputs(SHAPES))


class Looping(two_sections.Adding):
    """A narrow block whose gradients of weights are made in a loop."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(NARROW, rngs)

    def __call__(self, x):
        kernel = self.inner.kernel[...]
        step = jax.checkpoint(lambda carry, x: (carry, x @ kernel))
        _, out = jax.lax.scan(step, None, x.swapaxes(0, 1))
        return x + out.swapaxes(0, 1)


@pytest.mark.parametrize(
    ("block", "flops", "deferred"),
    [
        # Two matmuls; of each one's two gradients, the weight's can be deferred.
        (Block, 2 * TOKENS * 2 * WIDTH * HIDDEN, 0.5),
        # All in a scan, whose gradients come out of one equation.
        (RecurrentBlock, 2 * TOKENS * WIDTH * WIDTH, 0.0),
    ],
)
def test_work_of_a_block_is_its_matmuls(block, flops, deferred):
    work = traced(block)
    assert (work.flops, work.deferred) == (flops, deferred)


@pytest.mark.parametrize(
    ("narrow", "deferred"),
    [
        (two_sections.PARTS["narrow"], 0.5),
        # Of the narrow blocks nothing can be deferred: half of the wide ones' FLOPs.
        (Looping, 0.5 * 4 * WIDTH**2 / (4 * WIDTH**2 + 3 * NARROW**2)),
    ],
)
def test_work_of_two_sections_is_the_mean_of_their_blocks(narrow, deferred):
    """Four of 8 x 8 and three of 6 x 6; the part between does not count."""
    network = two_sections.make_network({**two_sections.PARTS, "narrow": narrow})
    loss = as_losses(loss_fn, None)[0]
    work = trace_microbatch(network, loss, abstract_inputs(SHAPES))
    assert work.flops == round(2 * TOKENS * (4 * WIDTH**2 + 3 * NARROW**2) / 7)
    assert work.deferred == pytest.approx(deferred)


@pytest.mark.parametrize(
    ("trained", "deferred"),
    [
        # Two matmuls for the gradients of inputs, and one for each kernel's.
        (["blocks/up/kernel", "embed/table"], 1 / 3),
        (["blocks/up/bias", "blocks/down/bias"], 0.0),
        (["head/table"], 0.0),
    ],
)
def test_weights_that_are_not_trained_have_no_gradients_to_defer(trained, deferred):
    network, loss = make_network(), as_losses(loss_fn, None)[0]
    rows = abstract_inputs(SHAPES)
    work = trace_microbatch(network, loss, rows, lambda params: trained)
    assert work.flops == 2 * TOKENS * 2 * WIDTH * HIDDEN
    assert work.deferred == pytest.approx(deferred)


def test_axis_name_that_a_pipeline_does_not_bind_is_refused():
    def loss(model, batch):
        return jax.lax.pmean(loss_fn(model, batch), "batch")

    with pytest.raises(ValueError, match=r"axis name 'batch' is not bound, and a pipe"):
        traced(loss=loss)


def test_other_name_errors_of_a_loss_stay_as_they_are():
    def loss(model, batch):
        return loss_fn(model, batch) * no_such_name  # pyright: ignore[reportUndefinedVariable]

    with pytest.raises(NameError, match="no_such_name"):
        traced(loss=loss)


def test_split_that_saves_no_time_is_refused_with_what_to_use():
    schedule = make_schedule("zero_bubble", 2, 4)
    check_split(schedule, 0.5)
    message = (
        r"schedule='zero_bubble': only 0% of the block's backward can be deferred.*"
        r"Use '1f1b', or pass the table.*make_schedule\('zero_bubble', 2, 4\)"
    )
    with pytest.raises(ValueError, match=message):
        check_split(schedule, 0.0)


@pytest.mark.parametrize(
    ("name", "times"),
    [("1f1b", (1.0, 2.0, 0.0)), ("zero_bubble", (1.0, 1.5, 0.5))],
)
def test_backward_is_two_forwards_less_what_is_deferred(name, times):
    found = times_of(make_schedule(name, 2, 2), 0.25)
    assert found == dict(zip(("forward", "backward", "weight"), times, strict=True))


def test_cost_is_that_of_the_times():
    """1F1B of 2 stages and 2 micro-batches: ticks F; F and F B; F B and B; B."""
    found = cost_of(make_schedule("1f1b", 2, 2), 0.5)
    assert (found.ticks, found.total) == (4, 1 + 3 + 3 + 2)
    assert found.bubble == pytest.approx(1 - 6 / 9)
