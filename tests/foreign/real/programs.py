"""What is a foreign program: a model, its loss, its optimizer and real-shaped data?

The loop that trains it on one device needs Flax and optax alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS = 16
KEY = 7
"""Of dropout and other noise, at every step: engines and the loop draw the same."""

Batch = Any
Variables = tuple[Any, Any]
"""Parameters, and whatever else the model holds."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A model as its repository trains it, but small.

    Attributes:
      model: a Linen module, or an NNX factory.
      loss: ``(model, batch) -> loss``, as the repository writes it.
      optimizer: the repository's default, or its kind.
      make_batch: of a generator, one global batch.
      loss_fn: what jaxpar is given instead of `loss`; None for `loss` itself.
      packs: whether a batch is packs, such as graphs, each of them one call's.
      options: further arguments of `jaxpar.initialize`.
      axis_rules: Linen's logical axis rules, in whose context the repository trains.
      axis_name: of the pmap in which the repository calls `loss`; "" if in none.
    """

    model: Any
    loss: Callable[[Any, Batch], jax.Array]
    optimizer: optax.GradientTransformation
    make_batch: Callable[[np.random.Generator], Batch]
    loss_fn: Callable[..., Any] | None = None
    packs: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    axis_rules: Sequence[tuple[str, str]] = ()
    axis_name: str = ""

    def batches(self, num: int, seed: int = 0) -> list[Batch]:
        """Make the batches of a run."""
        rng = np.random.default_rng(seed)
        return [self.make_batch(rng) for _ in range(num)]


@dataclasses.dataclass(frozen=True)
class PlainRun:
    """What the loop on one device gives.

    Attributes:
      start: the variables before.
      losses: of every step.
      states: the variables after every step.
      grad_norms: leaf by leaf, the largest of any step.
    """

    start: Variables
    losses: list[float]
    states: list[Variables]
    grad_norms: Any


def run_plainly(
    program: Program, start: Variables, batches: list[Batch], opt_state: Any = None
) -> PlainRun:
    """Train on one device by optax; `opt_state` None is the optimizer's first."""
    is_linen = isinstance(program.model, nn.Module)
    call = _call_linen if is_linen else _call_nnx

    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, batch: Batch) -> tuple:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            return call(program, (params, state), batch)

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = program.optimizer.update(grads, opt_state, params)
        norms = jax.tree.map(jnp.linalg.norm, jax.tree.map(jnp.ravel, grads))
        return optax.apply_updates(params, updates), after, opt_state, value, norms

    params, state = start
    opt_state = opt_state or program.optimizer.init(params)
    losses, states, largest = [], [], jax.tree.map(lambda _: 0.0, params)
    for batch in batches:
        params, state, opt_state, loss, norms = step(params, state, opt_state, batch)
        losses.append(float(loss))
        states.append(jax.device_get((params, state)))
        largest = jax.tree.map(lambda a, b: max(a, float(b)), largest, norms)
    return PlainRun(start, losses, states, largest)


class _PlainLinenModel:
    """A Linen module with its variables, as plain as they come."""

    def __init__(self, module: nn.Module, variables: dict):
        self.module, self.variables = module, variables

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mutable = [name for name in self.variables if name != "params"]
        out, new = self.module.apply(self.variables, *args, mutable=mutable, **kwargs)
        self.variables = {**self.variables, **new}
        return out


def _call_linen(program: Program, variables: Variables, batch: Batch) -> tuple:
    params, state = variables

    def call(batch: Batch) -> tuple:
        model = _PlainLinenModel(program.model, {"params": params, **state})
        value = program.loss(model, batch)
        return value, {name: model.variables[name] for name in state}

    if not program.axis_name:
        return call(batch)
    one_device = jax.tree.map(lambda x: x[None], batch)
    out = jax.vmap(call, axis_name=program.axis_name)(one_device)
    return jax.tree.map(lambda x: x[0], out)


_IS_STATE = nnx.Not(nnx.Any(nnx.Param, nnx.RngState))


def _call_nnx(program: Program, variables: Variables, batch: Batch) -> tuple:
    with nnx.use_eager_sharding(False):
        model = program.model(nnx.Rngs(0))
        for kind, values in zip((nnx.Param, _IS_STATE), variables, strict=True):
            own = nnx.state(model, kind)
            nnx.replace_by_pure_dict(own, values)
            nnx.update(model, own)
        value = program.loss(model, batch)
    return value, nnx.to_pure_dict(nnx.state(model, _IS_STATE))
