"""What is learned of a loss by tracing it, and is one that calls the host refused?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine.tracing import precision_of_check, trace_model
from jaxpar.model.bridge import make_network
from jaxpar.step.inputs import abstract_inputs
from jaxpar.step.loss import as_losses
from jaxpar.step.loss_check import HALF_TOLERANCE, TOLERANCE
from jaxpar.step.precision import make_precision

BATCH = {"x": np.ones((16, 4), np.float32)}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - 1.0) ** 2)


def printed(model, batch):
    value = loss(model, batch)
    jax.debug.print("the loss is {}", value)
    return value


def make_engine(**change):
    given = {"loss_fn": loss, "mesh": jaxpar.MeshShape(data=4, tensor=2)}
    return jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 6, rngs=rngs),
        optimizer=optax.sgd(0.1),
        sample_batch=BATCH,
        **(given | change),
    )


@pytest.mark.parametrize("argument", ["loss_fn", "eval_fn"])
def test_print_is_refused_before_anything_compiles(argument, compiled):
    message = (
        rf"{argument}: debug_\w+ at .*printed.*: JAX can't call the host .* as a "
        "metric, or pass coupled_batch=True"
    )
    with pytest.raises(ValueError, match=message):
        make_engine(**{argument: printed})
    assert compiled == []


def test_coupled_loss_may_print(capfd):
    value = make_engine(loss_fn=printed, coupled_batch=True).step(BATCH)["loss"]
    jax.effects_barrier()
    assert f"the loss is {float(value):.5f}"[:-1] in capfd.readouterr().out


def linear(rngs):
    return nnx.Linear(4, 6, rngs=rngs)


class Counting(nnx.Module):
    """A model whose training changes its state."""

    def __init__(self, rngs):
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(x))


def traced(model=linear, losses=(loss, None), rows=2, precision="fp32"):
    """The trace of a model's losses on some rows of a shard."""
    both = as_losses(*losses)
    inputs = abstract_inputs({"x": jax.ShapeDtypeStruct((rows, 4), jnp.float32)})
    network = make_network(model, both[0].on_sample, inputs)
    given = optax.sgd(0.1), make_precision(precision), inputs, ()
    return trace_model(network, both, *given, pipelined=False), inputs


@pytest.mark.parametrize("rows", [1, 8])
def test_flops_are_two_a_row_and_weight(rows):
    trace, _ = traced(rows=rows)
    assert trace.losses["loss_fn"].flops == 2 * rows * 4 * 6


def test_model_that_changes_its_state_does_so_in_training_alone():
    trace, _ = traced(Counting, (loss, lambda model, batch: loss(model, batch)))
    found = trace.losses["loss_fn"].coupled_state
    assert found == dict.fromkeys(("norm/mean", "norm/var"), "the rows of the batch")
    assert not trace.losses["eval_fn"].coupled_state
    assert not traced()[0].losses["loss_fn"].coupled_state


def test_draws_are_those_of_dropout_in_training_alone():
    trace, _ = traced(Counting, (loss, lambda model, batch: loss(model, batch)))
    shapes = {
        name: [draw.shape for draw in each.draws] for name, each in trace.losses.items()
    }
    assert (2, 4) in shapes["loss_fn"]
    assert (2, 4) not in shapes["eval_fn"]


def test_evaluation_is_traced_once_where_it_is_the_loss():
    assert list(traced()[0].losses) == ["loss_fn"]
    assert list(traced(losses=(loss, printed))[0].losses) == ["loss_fn", "eval_fn"]


def test_state_is_traced_with_fp32_masters():
    def half(rngs):
        return nnx.Linear(4, 6, param_dtype=jnp.bfloat16, rngs=rngs)

    trace, _ = traced(half)
    assert trace.abstract.params["kernel"].dtype == jnp.float32
    assert trace.block is None


def halved(model, batch):
    """A loss that computes in half precision whatever the parameters are."""
    return loss(model, batch).astype(jnp.bfloat16).astype(jnp.float32)


def half_alone(model, batch):
    """As a kernel that exists for half precision only."""
    if model.kernel.dtype != jnp.bfloat16:
        raise NotImplementedError("no fp32")
    return loss(model, {"x": batch["x"].astype(jnp.bfloat16)})


def in_its_dtype(model, batch):
    """A loss whose largest array has the dtype of the parameters."""
    out = model(batch["x"].astype(model.kernel.dtype))
    return jnp.mean(out @ jnp.ones((6, 1), out.dtype))


@pytest.mark.parametrize(
    ("loss_fn", "precision", "rows", "checked"),
    [
        (loss, "fp32", 2, ("fp32", TOLERANCE)),
        (halved, "fp32", 2, ("fp32", HALF_TOLERANCE)),
        (in_its_dtype, "bf16", 2, ("fp32", TOLERANCE)),
        (in_its_dtype, "bf16", 1, ("bf16", HALF_TOLERANCE)),
        (half_alone, "bf16", 2, ("bf16", HALF_TOLERANCE)),
    ],
)
def test_check_is_in_fp32_unless_the_loss_or_the_memory_forbids_it(
    loss_fn, precision, rows, checked
):
    trace, inputs = traced(losses=(loss_fn, None), rows=rows, precision=precision)
    given = trace.losses["loss_fn"], trace.abstract, make_precision(precision), inputs
    found, tolerance = precision_of_check(trace.network, *given)
    assert (found, tolerance) == (make_precision(checked[0]), checked[1])
