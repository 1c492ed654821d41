"""Which batch size would be large enough? The noise scale of the gradients.

Source: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training"
(2018), section 2.2 and appendix A.1.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar import tree
from jaxpar.engine.engine import Engine
from jaxpar.mesh import PIPE, on_abstract_mesh
from jaxpar.model.bridge import make_network
from jaxpar.offload import Offload
from jaxpar.step.inputs import (
    Inputs,
    Packed,
    make_inputs,
    microbatch_rows,
)
from jaxpar.step.loss import as_losses, loss_sums
from jaxpar.step.state import TrainState
from jaxpar.types import Batch


class NoiseScale(NamedTuple):
    """What the gradients' norms at two batch sizes say.

    Attributes:
      grad_square: |G|^2, the squared norm of the true gradient.
      variance: tr(S), the sum of the variances of one row's gradient.
    """

    grad_square: float
    variance: float

    @property
    def scale(self) -> float:
        """B_simple = tr(S) / |G|^2, in rows; infinite where no gradient is seen."""
        seen = self.grad_square > 0
        return self.variance / self.grad_square if seen else math.inf


def noise_scale(
    small: float, big: float, *, small_rows: int, big_rows: int
) -> NoiseScale:
    """Estimate |G|^2 and tr(S), both without bias.

    A gradient over B rows has the expected squared norm |G|^2 + tr(S) / B.

    Args:
      small: mean squared norm of gradients over `small_rows` rows.
      big: mean squared norm of gradients over `big_rows` rows.
      small_rows: fewer than `big_rows`.
      big_rows: rows of the whole batch.

    Example:
      >>> noise_scale(3.0, 1.5, small_rows=2, big_rows=8)
      NoiseScale(grad_square=1.0, variance=4.0)
      >>> noise_scale(3.0, 1.5, small_rows=2, big_rows=8).scale
      4.0
    """
    square = (big_rows * big - small_rows * small) / (big_rows - small_rows)
    return NoiseScale(square, (small - big) / (1 / small_rows - 1 / big_rows))


class GradientNoise:
    """An evaluation of the gradient noise scale, for `jaxpar.train`.

    ``evaluate={"": heldout, "noise": GradientNoise(engine, batches)}`` logs
    ``eval/noise/scale``, in rows, every `eval_every` steps. Batches much smaller than
    it waste steps, much larger ones waste computation. The two estimates that it is
    the ratio of are means over the batches; take several, for they are noisy.

    It is apart from the training step: a jitted function of the parameters, without
    the engine's precision and reductions. Its cost is a forward and a backward pass
    over each batch in fp32 (not bf16 or fp16), and memory for two gradients more.

    Args:
      engine: of one loss. Parameters may be sharded over data and tensor.
      batches: as `Engine.step` takes them, of training data, that end; read
        anew at each call.
      microbatches: parts of a batch; the gradient of each is the small one.

    Raises:
      ValueError: if the engine has several losses, a pipeline, packs, or offload, or
        `microbatches` is below 2 or does not divide the rows.
    """

    def __init__(self, engine: Engine, batches: Iterable[Batch], microbatches: int = 4):
        own, arguments = engine.loss(), engine.arguments
        self._engine, self._batches = engine, batches
        self._spec, self._parts = own.batch_spec, microbatches
        _check(engine, microbatches)
        sample = self._spec.structs()
        self._network = make_network(arguments["model"], arguments["loss_fn"], sample)
        self._loss = as_losses(arguments["loss_fn"], None)[0]
        self._squares = jax.jit(self._find_squares)

    def __call__(self) -> dict[str, float]:
        """Compute it.

        Returns:
          "scale", "variance" and "grad_square", as in `NoiseScale`.

        Raises:
          ValueError: if there is no batch.
        """
        state = self._engine.state
        found = [self._squares(state, self._spec.put(each)) for each in self._batches]
        if not found:
            raise ValueError("batches: there is none; give one or more.")
        small, big = (float(sum(own) / len(own)) for own in zip(*found, strict=True))
        rows = self._spec.num_rows
        sizes = {"small_rows": rows // self._parts, "big_rows": rows}
        noise = noise_scale(small, big, **sizes)
        return {"scale": noise.scale} | {
            name: getattr(noise, name) for name in ("variance", "grad_square")
        }

    def _find_squares(
        self, state: TrainState, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """The mean squared norm over micro-batches, and that of the whole batch."""
        inputs = make_inputs(batch, state.step)

        def add(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
            grads, weights, squares = carry
            rows = microbatch_rows(inputs, index, self._parts)
            own, weight = self._gradient(state, rows, index)
            square = optax.tree.norm(own, squared=True)
            grads = jax.tree.map(lambda x, y: x + weight * y, grads, own)
            return (grads, weights + weight, squares + square), None

        with on_abstract_mesh(self._engine.mesh):
            zeros = jax.tree.map(jnp.zeros_like, state.params)
            start = zeros, jnp.float32(0), jnp.float32(0)
            numbers = jnp.arange(self._parts)
            (grads, weight, squares), _ = jax.lax.scan(add, start, numbers)
        big = jnp.asarray(optax.tree.norm(grads, squared=True)) / weight**2
        return squares / self._parts, big

    def _gradient(
        self, state: TrainState, rows: Inputs, index: jax.Array
    ) -> tuple[Any, jax.Array]:
        """The gradient of a micro-batch's mean loss, and its weight."""
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), index)

        def mean(params: Any) -> tuple[jax.Array, jax.Array]:
            def fn(model: Any, inputs: Inputs) -> Any:
                return self._loss(model, inputs, key=key, training=True)

            given = (tree.merged(params, state.frozen), state.model_state), key, rows
            how = {"training": True, "step": rows.step.value}
            out, _ = self._network.run(fn, *given, **how)
            loss = loss_sums(out, rows).loss
            return loss.total / loss.weight, loss.weight

        (_, weight), grads = jax.value_and_grad(mean, has_aux=True)(state.params)
        return grads, weight


def _check(engine: Engine, microbatches: int) -> None:
    """Raise for an engine whose gradients are not computed here."""
    spec = engine.loss().batch_spec
    if microbatches < 2 or spec.num_rows % microbatches:
        raise ValueError(
            f"microbatches={microbatches} must be at least 2 and divide the batch's "
            f"{spec.num_rows} rows."
        )
    for has, what in (
        (engine.mesh.shape[PIPE] > 1, "a pipeline"),
        (isinstance(spec.structs(), Packed), "a batch of jaxpar.Packed"),
        (engine.arguments["offload"] not in (None, Offload.nothing()), "offload"),
    ):
        if has:
            raise ValueError(
                f"engine: it has {what}, of which the noise scale is not computed; "
                "measure it with an engine of the same model without."
            )
