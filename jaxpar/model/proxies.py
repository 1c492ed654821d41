"""How does loss_fn call a model that is split into stages: by a recording proxy.

loss_fn is ordinary code that calls ``model(inputs)`` once. Run up to the call, it gives
the embedding's inputs; run with the head's output, it gives the loss.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend import core

from jaxpar import tree
from jaxpar.model.bridge import Network
from jaxpar.model.linen import LinenModel
from jaxpar.model.model_state import Variables, cast_model_state
from jaxpar.types import Batch, LossFn, PyTree

_PLAIN = (bool, int, float, str)
_ARRAYS = (jax.Array, np.ndarray, np.generic)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call of the model, or of one of its parts.

    As a pytree its leaves are the arrays. Python flags, numbers and strings are static,
    so a part may branch on them (a Linen module on ``training``).

    Attributes:
      args: positional arguments.
      kwargs: keyword arguments.
      step: the number of the step that modules see.
    """

    args: tuple
    kwargs: dict[str, Any]
    step: Any = None

    def passing(self, hidden: Any) -> "Call":
        """The call of a block or the head: `hidden` and the keywords."""
        return Call((hidden,), self.kwargs, self.step)

    def tree_flatten(self) -> tuple[list, tuple]:
        """Separate the arrays from static values."""
        leaves, structure = jax.tree.flatten((self.args, self.kwargs, self.step))
        plain = tuple(leaf if isinstance(leaf, _PLAIN) else None for leaf in leaves)
        arrays = [leaf for leaf in leaves if not isinstance(leaf, _PLAIN)]
        return arrays, (structure, plain)

    @classmethod
    def tree_unflatten(cls, static: tuple, arrays: Iterable[Any]) -> "Call":
        """Undo `tree_flatten`."""
        structure, plain = static
        rest = iter(arrays)
        leaves = [next(rest) if leaf is None else leaf for leaf in plain]
        return cls(*jax.tree.unflatten(structure, leaves))


class _Recorded(BaseException):
    """Raised to leave loss_fn where it calls the model."""

    def __init__(self, call: Call):
        super().__init__()
        self.call = call


class ModelProxy:
    """Replaces the model in loss_fn in a pipeline.

    Args:
      answer: maps a call's arguments to its result.
      training: whether this is a training step, as on `jaxpar.model.linen.LinenModel`.
    """

    def __init__(self, answer: Callable[[Call], Any], *, training: bool):
        self._answer, self.training = answer, training
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self.num_calls += 1
        if self.num_calls > 1:
            raise ValueError(
                "loss_fn: it calls the model twice, but a pipeline runs a model once a "
                "micro-batch; call it once, on all its inputs, or use pipe=1."
            )
        return self._answer(Call(args, kwargs))

    def __getattr__(self, name: str) -> Any:
        refuse_reading(name)


def refuse_reading(name: str) -> NoReturn:
    """Raise for reading an attribute of a `PipelineModel`."""
    if name.startswith("__"):
        # Python asks whether an object can be copied, JAX whether it is an array.
        raise AttributeError(f"A PipelineModel has no {name}.")
    raise ValueError(
        f"loss_fn: it reads model.{name}, but a PipelineModel can only be called: "
        "its parts are on different devices. Return the values that the loss needs "
        "from the head, or pass them in the batch."
    )


def inputs_of(loss_fn: LossFn, batch: Batch, *, training: bool) -> Call:
    """Run loss_fn up to its call of the model.

    Returns:
      The arguments of the call.

    Raises:
      TypeError: if it never calls the model, or with an unsupported argument.
      ValueError: if it calls the model inside a transformation.
    """
    outside = core.get_opaque_trace_state(convention="nnx")

    def leave(call: Call) -> Any:
        if core.get_opaque_trace_state(convention="nnx") != outside:
            raise ValueError(
                "loss_fn: it calls the model inside jax.checkpoint, jax.vmap, jax.jit "
                "or another transformation, but a PipelineModel is split at this "
                "call; call it outside of them, and choose what to recompute with "
                "PipelineModel(remat=...)."
            )
        raise _Recorded(call)

    try:
        loss_fn(ModelProxy(leave, training=training), batch)
    except _Recorded as recorded:
        _check_inputs(recorded.call)
        return recorded.call
    raise TypeError(
        "loss_fn: it never called model(...), so a PipelineModel has no inputs; call "
        "the model with the batch's inputs."
    )


def _check_inputs(call: Call) -> None:
    """Raise for arguments that are neither arrays nor static values."""
    given = {f"argument {i}": arg for i, arg in enumerate(call.args)} | call.kwargs
    for name, leaf in tree.named_leaves(given).items():
        if not isinstance(leaf, (*_ARRAYS, *_PLAIN)):
            raise TypeError(
                f"loss_fn: it calls the model with {name} of type "
                f"{type(leaf).__name__}, but a part can only get arrays, or Python "
                "flags, numbers and strings; make it an array, or pass it to the "
                "part's constructor."
            )


def call_part(model: Any, call: Call) -> Any:
    """Call a part with the keywords that it takes."""
    taken = _keywords_taken(model, call)
    kwargs = {
        name: value
        for name, value in call.kwargs.items()
        if taken is None or name in taken
    }
    return model(*call.args, **kwargs)


def _keywords_taken(model: Any, call: Call) -> set[str] | None:
    """Keywords that a part's call takes; None for any."""
    module = model.module if isinstance(model, LinenModel) else model
    parameters = list(inspect.signature(type(module).__call__).parameters.values())
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    by_keyword = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return by_keyword | set(places[1 + len(call.args) :])


def keywords_of(network: Network, call: Call) -> set[str] | None:
    """Keywords that a part takes; None for any."""
    found: list[set[str] | None] = []

    def look(model: Any, call: Call) -> tuple:
        found.append(_keywords_taken(model, call))
        return ()

    _traced(network, look, call)
    return found[0]


def program_of(network: Network, call: Call) -> str:
    """A part's jaxpr as text, equal for equal computations."""

    def run(key: jax.Array, variables: Variables, call: Call) -> Any:
        return run_part(network, variables, call, key, training=True)

    key = jax.random.key(0)
    variables = jax.eval_shape(network.init, key)
    closed = jax.make_jaxpr(run)(key, variables, call)
    texts = [str(closed.jaxpr), *map(str, closed.consts)]
    return re.sub("0x[0-9a-f]+", "", "\n".join(texts))


def run_part(
    network: Network,
    variables: Variables,
    call: Call,
    key: jax.Array,
    *,
    training: bool,
) -> tuple[Any, PyTree]:
    """Call a part with its parameters and state; returns its result and new state."""
    given = call_part, variables, key, call
    return network.run(*given, training=training, step=call.step)


def shape_of(network: Network, call: Call) -> PyTree:
    """The shapes of a part's result."""
    return _traced(network, call_part, call)


def _traced(network: Network, fn: Callable[[Any, Call], Any], call: Call) -> PyTree:
    """The shapes of the result of ``fn(part, call)``."""

    def run(key: jax.Array, call: Call) -> Any:
        return network.run(fn, network.init(key), key, call, training=True)[0]

    return jax.eval_shape(run, jax.random.key(0), call)


def run_named(
    name: str,
    part: Network,
    variables: Variables,
    call: Call,
    key: jax.Array,
    *,
    training: bool,
) -> tuple[Any, PyTree]:
    """Run a part; its state keeps its dtypes, and in an evaluation its values."""
    with jax.named_scope(name):
        out, after = run_part(part, variables, call, key, training=training)
    if not training:
        return out, variables[1]
    return out, cast_model_state({name: after}, {name: variables[1]})[name]
