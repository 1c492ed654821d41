"""How does a scan over layers run, if every layer's parameters are gathered for it?

A plain scan saves what its backward pass reads, and gathered parameters would be among
it: all layers, one stack. A `LayerLoop` has a backward pass of its own, a scan that
gathers each layer again, and it saves only what differentiating the body needs besides.
Both scans can gather the next layer while they compute one: nothing in the compiled
program then waits for a gather but the first. (The gathered layer is carried, which a
scan that jax differentiates would save for every layer.) Layers may be chosen when the
program runs: both passes then loop over these alone.

Source of the schedule: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel", section 3.3.2 (forward and backward prefetching).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.jaxprs.chosen_layers import Chosen, iterate_chosen
from jaxpar.jaxprs.dependence import of_first_inputs
from jaxpar.jaxprs.layers import Layers, iterate
from jaxpar.jaxprs.residuals import instantiated

Arrays = Sequence[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerLoop(Layers):
    """A scan over layers, some of whose inputs are gathered layer by layer.

    Attributes:
      body: ``(consts, carry, layer, xs) -> (carry, ys)``, lists of arrays; `layer` are
        the gathered parameters. It chooses its own residuals.
      reduce: gradients of a layer's parameters, and its number -> those of their
        slots' slices, in the slots' dtypes.
      keep: whether the backward pass reads the gathered layers of the forward pass.
      numbered: whether `reduce` reads the number; else it is None.
      passed: number of a stack that is returned -> number of the xs that it is where a
        layer is not chosen.
    """

    body: Callable[..., tuple[list, list]]
    reduce: Callable[[Arrays, Any], list]
    keep: bool = False
    numbered: bool = False
    passed: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        consts: Arrays,
        init: Arrays,
        slots: Sequence[jax.Array | None],
        shards: Arrays,
        xs: Arrays,
        chosen: Chosen | None = None,
    ) -> tuple[list, list]:
        """Run the loop; differentiable by reverse mode, once.

        Args:
          consts: what every iteration reads.
          init: what the first iteration is given.
          slots: by parameter, the stack whose gradient is that of the shards; its
            values are not read. None for one that is not trained.
          shards: the stacks of shards, ``[length, ...]``.
          xs: the other stacks.
          chosen: the layers that are run; None for all.

        Returns:
          What the last iteration returned, and the stacks of what each one did.
        """
        return _differentiable(self)(consts, init, slots, shards, xs, chosen)

    def run(
        self,
        chosen: Chosen | None,
        starts: Mapping[int, jax.Array],
        *given: Any,
        **how: Any,
    ) -> tuple[Any, Any, list | None]:
        """`iterate`, or `iterate_chosen` with what stacks hold of other layers."""
        if chosen is None:
            return iterate(self, *given, **how)
        return iterate_chosen(self, chosen, *given, starts=starts, **how)


def _differentiable(loop: LayerLoop) -> Callable[..., tuple[list, list]]:
    @jax.custom_vjp
    def call(
        consts: list,
        init: list,
        slots: list,
        shards: list,
        xs: list,
        chosen: Chosen | None,
    ) -> tuple:
        del slots

        def step(carry: list, layer: list, own: list) -> tuple[list, list]:
            return loop.body(consts, carry, layer, own)

        starts = _passed(loop, xs)
        carry, ys, _ = loop.run(chosen, starts, shards, step, init, xs)
        return carry, ys

    def forward(*given: Any) -> tuple[tuple, tuple]:
        consts, init, slots, shards, xs, chosen = jax.tree.map(
            lambda primal: primal.value, given, is_leaf=_is_primal
        )
        moving = [[_moves(x) for x in given[0]], [_moves(x) for x in given[4]]]
        trained = [slot is not None for slot in slots]
        layer = jax.eval_shape(loop.gather, [_slice_of(x) for x in shards])
        own = [_slice_of(x) for x in xs]
        step = _trace_step(loop, (consts, init, layer, own), moving, trained)

        # The call is one operation: a `jax.checkpoint` around the loop then saves its
        # results, and does not look into the scan.
        run = jax.custom_vjp(lambda *args: _forward(loop, step, *args))
        run.defvjp(_not_differentiated, _not_differentiated)
        outs, saved = run(consts, init, shards, xs, chosen)
        read = [] if loop.keep else shards
        return outs, (step, consts, read, xs, chosen, saved)

    def backward(residuals: tuple, cotangents: tuple) -> tuple:
        return _backward(loop, residuals, cotangents)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """An iteration that also returns what its backward pass reads.

    Attributes:
      closed: ``(*consts, *carry, *layer, *xs) -> (*carry, *ys, *residuals)``.
      num_consts: the number of consts.
      num_carry: likewise.
      num_outs: carry and ys.
      once: the jaxpr of the residuals that are the same in every iteration, from
        consts.
      origins: by residual, where it comes from: "once", "layer", "xs" or "stack", and
        its number there.
      pull: the structure of the function whose leaves the residuals are.
      moving_consts: by const, whether it has a gradient.
      moving_xs: likewise.
      trained: by parameter of a layer.
    """

    closed: core.ClosedJaxpr
    num_consts: int
    num_carry: int
    num_outs: int
    once: core.ClosedJaxpr
    origins: tuple[tuple[str, int], ...]
    pull: Any
    moving_consts: tuple[bool, ...]
    moving_xs: tuple[bool, ...]
    trained: tuple[bool, ...]


def _trace_step(
    loop: LayerLoop,
    given: tuple[Arrays, Arrays, Arrays, Arrays],
    moving: Sequence[Sequence[bool]],
    trained: Sequence[bool],
) -> _Step:
    """Trace an iteration and its derivative; see `_Step`."""
    consts, carry, layer, xs = given
    moves = [*moving[0], *map(_is_inexact, carry), *trained, *moving[1]]
    sizes = [len(part) for part in given]
    found: dict[str, Any] = {}

    def step(*flat: Any) -> tuple[list, list]:
        def of_moving(moved: Arrays) -> tuple[list, list]:
            merged = _merged(moves, moved, _only(flat, moves, False))
            carry, ys = loop.body(*_parts(merged, sizes))
            outs = [*carry, *ys]
            flags = [_is_inexact(x) for x in outs]
            found["outs"] = flags
            return _only(outs, flags, True), _only(outs, flags, False)

        outs, pull, others = jax.vjp(of_moving, _only(flat, moves, True), has_aux=True)
        leaves, found["pull"] = jax.tree.flatten(pull)
        return _merged(found["outs"], outs, others), leaves

    flat = [*consts, *carry, *layer, *xs]
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), _dtype(x)) for x in flat]
    closed = jax.make_jaxpr(step)(*shapes)
    num_outs = len(found["outs"])
    return _Step(
        closed,
        sizes[0],
        sizes[1],
        num_outs,
        *_origins(closed, sizes, num_outs),
        found["pull"],
        tuple(moving[0]),
        tuple(moving[1]),
        tuple(trained),
    )


def _origins(
    closed: core.ClosedJaxpr, sizes: Sequence[int], num_outs: int
) -> tuple[core.ClosedJaxpr, tuple[tuple[str, int], ...]]:
    """Where residuals come from; see `_Step.once` and `_Step.origins`."""
    jaxpr = closed.jaxpr
    _, _, layer, xs = _parts(jaxpr.invars, sizes)
    of_consts, once = of_first_inputs(closed, sizes[0])
    wanted = [number for number in of_consts if number >= num_outs]
    places = {number: place for place, number in enumerate(of_consts)}
    known = {var: ("layer", n) for n, var in enumerate(layer)}
    known |= {var: ("xs", n) for n, var in enumerate(xs)}
    origins, stacked = [], 0
    for number, var in enumerate(jaxpr.outvars[num_outs:], num_outs):
        if number in wanted:
            origins.append(("once", places[number]))
        elif not isinstance(var, core.Literal) and var in known:
            origins.append(known[var])
        else:
            origins.append(("stack", stacked))
            stacked += 1
    return once, tuple(origins)


def _forward(
    loop: LayerLoop,
    step: _Step,
    consts: list,
    init: list,
    shards: list,
    xs: list,
    chosen: Chosen | None,
) -> tuple[tuple, tuple]:
    """Run the loop, and save what the backward pass reads."""
    run = core.jaxpr_as_fun(step.closed)
    is_stacked = [kind == "stack" for kind, _ in step.origins]

    def iteration(carry: list, layer: list, own: list) -> tuple[list, tuple]:
        outs = run(*consts, *carry, *layer, *own)
        carry, ys = outs[: step.num_carry], outs[step.num_carry : step.num_outs]
        stacked = _only(outs[step.num_outs :], is_stacked, True)
        return carry, (ys, stacked, layer if loop.keep else [])

    given = shards, iteration, init, xs
    starts, again = _passed(loop, xs), not loop.keep
    carry, rest, last = loop.run(chosen, starts, *given, again=again)
    ys, stacked, layers = rest
    once = core.jaxpr_as_fun(step.once)(*consts)
    return (carry, ys), (once, stacked, layers, last)


def _backward(loop: LayerLoop, residuals: tuple, cotangents: tuple) -> tuple:
    """The gradients of the loop's arguments."""
    step, consts, shards, xs, chosen, (once, stacked, layers, first) = residuals
    if loop.keep:
        loop = dataclasses.replace(loop, gather=list, ahead=False)
        shards = layers
    outs = [instantiated(x) for x in (*cotangents[0], *cotangents[1])]
    carry, ys = outs[: step.num_carry], outs[step.num_carry :]
    moving_carry, moving_ys = (list(map(_is_inexact, part)) for part in (carry, ys))

    def iteration(state: tuple, layer: list, own: tuple) -> tuple[tuple, tuple]:
        (summed, ct_carry), (x, kept, ct_ys, number) = state, own
        sources = {"once": once, "layer": layer, "xs": x, "stack": kept}
        leaves = [sources[kind][number] for kind, number in step.origins]
        pull = jax.tree.unflatten(step.pull, leaves)
        (pulled,) = pull([*ct_carry, *ct_ys])
        counts = map(sum, (step.moving_consts, moving_carry, step.trained))
        ct_consts, ct_carry, ct_layer, ct_xs = _parts(pulled, [*counts, None])
        summed = [a + b for a, b in zip(summed, ct_consts, strict=True)]
        return (summed, ct_carry), (loop.reduce(ct_layer, number), ct_xs)

    zeros = [jnp.zeros_like(x) for x in _only(consts, step.moving_consts, True)]
    start = zeros, _only(carry, moving_carry, True)
    numbers = jnp.arange(loop.length) if loop.numbered else None
    given = xs, stacked, _only(ys, moving_ys, True), numbers
    (summed, ct_init), (reduced, ct_xs), _ = loop.run(
        chosen,
        _passed_back(loop, step, ys),
        *(shards, iteration, start, given),
        backward=True,
        layer=first,
    )
    none = [None] * len(step.trained)
    return (
        _merged(step.moving_consts, summed, [None] * len(consts)),
        _merged(moving_carry, ct_init, [None] * len(carry)),
        _merged(step.trained, reduced, none),
        none,
        _merged(step.moving_xs, ct_xs, [None] * len(xs)),
        None,
    )


def _passed(loop: LayerLoop, xs: Arrays) -> dict[int, Any]:
    """By stack that is returned: the xs that it is where a layer is not chosen."""
    return {number: xs[own] for number, own in loop.passed.items()}


def _passed_back(loop: LayerLoop, step: _Step, ys: Arrays) -> dict[int, Any]:
    """By stack of gradients: that of xs is then that of what it was returned as."""
    first = sum(step.trained)
    places = [n for n, moves in enumerate(step.moving_xs) if moves]
    return {
        first + places.index(own): ys[number]
        for number, own in loop.passed.items()
        if own in places
    }


def _not_differentiated(*_: Any) -> Any:
    raise TypeError("LayerLoop: a scan over gathered layers has one derivative.")


def _only(values: Arrays, flags: Sequence[bool], wanted: bool) -> list:
    return [x for x, flag in zip(values, flags, strict=True) if flag == wanted]


def _merged(flags: Sequence[bool], chosen: Arrays, others: Arrays) -> list:
    """Undo `_only`: by flag, the next of `chosen`, or of `others`."""
    left, right = iter(chosen), iter(others)
    return [next(left) if flag else next(right) for flag in flags]


def _parts(values: Arrays, sizes: Sequence[int | None]) -> list[list]:
    """Cut a list into parts of given sizes; None takes what is left."""
    left = list(values)
    found = []
    for size in sizes:
        count = len(left) if size is None else size
        found.append(left[:count])
        left = left[count:]
    return found


def _slice_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(_dtype(x), jnp.inexact)


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def _moves(primal: Any) -> bool:
    return primal.perturbed and _is_inexact(primal.value)
