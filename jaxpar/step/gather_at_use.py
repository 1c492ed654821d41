"""When is a parameter gathered: where the loss function first uses it.

A loss function is written for unsharded parameters; at ZeRO 3 they are shards.
`call_gathering_at_use` traces the function to a jaxpr and evaluates it with
`GatheredAtUse` leaves in place of the parameters. The first equation that needs one
gathers it. A leaf that a scan slices layer by layer is sliced as a shard and gathered
for one layer at a time, and its gradient is reduced there too (`LayerLoop`). ZeRO 2
gathers once a step and uses the same leaves to reduce gradients every micro-batch.
Works for any model, without changes to the user's code.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.jaxprs.choices import ScanChoice, without_choice
from jaxpar.jaxprs.chosen_layers import Chosen
from jaxpar.jaxprs.compat import scan_counts
from jaxpar.jaxprs.evaluate import bind_in_scope, read, scope_of
from jaxpar.jaxprs.layer_loop import LayerLoop
from jaxpar.jaxprs.residuals import with_own_residuals
from jaxpar.step.gathered_leaf import GatheredAtUse
from jaxpar.step.loops import gathered_in, is_used_whole

# Their results are as large as the parameter and cheap to recompute. Saved as residuals
# they would keep a gathered leaf alive until the backward pass.
_LAYOUT_OPS = frozenset(
    {
        "all_gather",
        "sharding_constraint",
        "convert_element_type",
        "reshape",
        "transpose",
        "squeeze",
        "concatenate",
        "slice",
        "split",
        "broadcast_in_dim",
        "name",
        "copy",
    }
)

_CALLS = {"custom_vjp_call": "call_jaxpr", "shard_map": "jaxpr"}
"""Call primitive -> the parameter that holds the called jaxpr."""


def call_gathering_at_use(
    fn: Callable[..., Any], leaves: Sequence[GatheredAtUse], *args: Any
) -> Any:
    """Evaluate ``fn(leaves, *args)``, gathering each leaf at its first use.

    Args:
      fn: takes a list of unsharded leaves and pytrees of arrays; returns a pytree.
      leaves: the leaves, not gathered yet.
      *args: the other arguments.

    Returns:
      What `fn` returns. The backward pass gathers the leaves again, unless they are
      kept (see `Gathering`).
    """
    whole = [
        jax.ShapeDtypeStruct(leaf.leaf_sharding.shape, leaf.dtype) for leaf in leaves
    ]
    flat_args, args_tree = jax.tree.flatten(args)

    def flat_fn(leaves: list, flat_args: list) -> Any:
        return fn(leaves, *jax.tree.unflatten(args_tree, flat_args))

    closed, out_shape = jax.make_jaxpr(flat_fn, return_shape=True)(whole, flat_args)

    def body(arrays: list, flat_args: list) -> list:
        deferred = [
            leaf.rebuilt(a, leaf.leaf_sharding)
            for leaf, a in zip(leaves, arrays, strict=True)
        ]
        return _evaluate(closed, [*deferred, *flat_args])

    if any(_is_gathered_again(leaf) for leaf in leaves):
        body = jax.checkpoint(body, policy=_refuse_layout_ops)
    outs = body([leaf.arrays for leaf in leaves], flat_args)
    # A constant output is a NumPy literal in the jaxpr.
    outs = [jnp.asarray(out) for out in outs]
    return jax.tree.unflatten(jax.tree.structure(out_shape), outs)


def call_choosing_layers(fn: Callable[..., Any], *args: Any) -> Any:
    """Evaluate ``fn(*args)``; loops that leave layers out run over the others alone.

    Args:
      fn: takes and returns pytrees of arrays.
      *args: its arguments.
    """
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    outs = [jnp.asarray(out) for out in _evaluate(closed, jax.tree.leaves(args))]
    return jax.tree.unflatten(jax.tree.structure(out_shape), outs)


def _is_gathered_again(leaf: GatheredAtUse) -> bool:
    return not (leaf.gathering.is_done or leaf.gathering.keep)


def _refuse_layout_ops(prim: Any, *_: Any, **params: Any) -> bool:
    # `_use` and a gather on tensor shards are calls; jax asks once for each call.
    body = params.get(_CALLS.get(prim.name, ""))
    if body is None:
        return prim.name not in _LAYOUT_OPS
    eqns = getattr(body, "jaxpr", body).eqns
    return any(_refuse_layout_ops(eqn.primitive, **eqn.params) for eqn in eqns)


def _evaluate(closed: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr some of whose inputs are `GatheredAtUse`; outputs are arrays."""
    jaxpr = closed.jaxpr
    env: dict[core.Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [read(env, atom) for atom in eqn.invars]
        rule = _RULES.get(eqn.primitive.name, _bind)
        with scope_of(eqn):
            outs = rule(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_made(read(env, atom)) for atom in jaxpr.outvars]


def _made(value: Any) -> Any:
    return value.make() if isinstance(value, GatheredAtUse) else value


def _bind(eqn: core.JaxprEqn, ins: Sequence[Any]) -> list[jax.Array]:
    return bind_in_scope(eqn, [_made(x) for x in ins])


def _inline(eqn: core.JaxprEqn, ins: Sequence[Any]) -> list[jax.Array]:
    return _evaluate(eqn.params["jaxpr"], ins)


def _checkpoint(eqn: core.JaxprEqn, ins: Sequence[Any]) -> list[jax.Array]:
    """The user's own remat. Its leaves are gathered outside, so the backward pass
    gathers them once for the recomputation and the gradient."""
    closed = core.ClosedJaxpr(eqn.params["jaxpr"], ())
    ins = [
        _made(value) if is_used_whole(closed.jaxpr, var) else value
        for var, value in zip(closed.jaxpr.invars, ins, strict=True)
    ]

    def body(packed: list) -> list:
        return _evaluate(closed, _unpacked(ins, packed))

    run = jax.checkpoint(
        body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
    )
    return with_own_residuals(run)([_packed(x) for x in ins])


def _scan(eqn: core.JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    """Slice leaves layer by layer as shards; gather those that can't be sliced.

    A scan that leaves layers out runs over the others alone.
    """
    num_consts, num_carry = scan_counts(eqn.params)
    first = num_consts + num_carry
    consts = [_made(x) for x in ins[:num_consts]]
    init = [_made(x) for x in ins[num_consts:first]]
    eqn, choice = without_choice(eqn)
    stacks = _Stacks.of(eqn, ins[first:])

    def body(*given: Sequence[Any]) -> tuple[list, list]:
        def run(consts: list, carry: list, layer: list, xs: list) -> list:
            own = stacks.sliced(layer, xs)
            return _evaluate(eqn.params["jaxpr"], [*consts, *carry, *own])

        if stacks.has_leaves or choice is not None:
            # Otherwise what is made of a parameter alone is saved, for all layers.
            run = jax.checkpoint(run, policy=_refuse_layout_ops, prevent_cse=False)
        outs = run(*map(list, given))
        return outs[:num_carry], outs[num_carry:]

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    if choice is not None:
        flags = choice.of_all(consts, ins[first:])
        chosen = Chosen.of(flags, choice.fraction)
        loop = stacks.loop(body, how, choice)
        carry, ys = loop(consts, init, *stacks.arrays, chosen)
    elif stacks.layers:
        carry, ys = stacks.loop(body, how)(consts, init, *stacks.arrays)
    else:
        xs = stacks.arrays[-1]
        carry, ys = jax.lax.scan(lambda c, x: body(consts, c, [], x), init, xs, **how)
    return [*carry, *ys]


@dataclasses.dataclass(frozen=True)
class _Stacks:
    """What a scan slices.

    Attributes:
      layers: slices of the parameters that are gathered for each iteration; their
        arrays are the stacks.
      others: the other stacks: arrays, and parameters for a scan inside.
      parts: by other stack, a parameter's slice.
      is_layer: by stack, in the scan's order.
    """

    layers: list[GatheredAtUse]
    others: list[Any]
    parts: list[GatheredAtUse | None]
    is_layer: list[bool]

    @classmethod
    def of(cls, eqn: core.JaxprEqn, stacks: Sequence[Any]) -> "_Stacks":
        """Sort a scan's stacks; gathers parameters that can't be sliced as shards."""
        slices = [
            x.without_leading_dim() if isinstance(x, GatheredAtUse) else None
            for x in stacks
        ]
        is_layer = gathered_in(eqn, slices)
        sorted_stacks = list(zip(stacks, slices, is_layer, strict=True))
        layers = [part for _, part, flag in sorted_stacks if flag and part is not None]
        left = [(x, part) for x, part, flag in sorted_stacks if not flag]
        others = [x if part is not None else _made(x) for x, part in left]
        return cls(layers, others, [part for _, part in left], is_layer)

    @property
    def arrays(self) -> tuple[list, list, list]:
        """Slots and shards of the layers, and the others, for a `LayerLoop`."""
        slots, shards = ([leaf.arrays[n] for leaf in self.layers] for n in (0, 1))
        return slots, shards, jax.tree.leaves(self._packed_others)

    def sliced(self, layer: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        """One slice of every stack, in the scan's order."""
        packed = jax.tree.unflatten(jax.tree.structure(self._packed_others), xs)
        own = iter(_unpacked([part or x for x, part in self._left], packed))
        gathered = iter(layer)
        return [next(gathered) if flag else next(own) for flag in self.is_layer]

    @property
    def has_leaves(self) -> bool:
        """Whether any stack is a parameter."""
        return bool(self.layers) or any(part is not None for part in self.parts)

    @property
    def _packed_others(self) -> list[Any]:
        """Parameters for a scan inside are two arrays, a slot and a shard."""
        return [_packed(x) for x in self.others]

    def _place(self, stack: int) -> int:
        """Where the array of a stack that is not a parameter is among the others."""
        assert not self.is_layer[stack], "a parameter is not returned"
        own = sum(not flag for flag in self.is_layer[:stack])
        assert self.parts[own] is None, "a parameter is not returned"
        return len(jax.tree.leaves(self._packed_others[:own]))

    @property
    def _left(self) -> list[tuple[Any, GatheredAtUse | None]]:
        return list(zip(self.others, self.parts, strict=True))

    def loop(
        self,
        body: Callable[..., tuple],
        how: dict[str, Any],
        choice: ScanChoice | None = None,
    ) -> LayerLoop:
        """The scan over layers, of a length and direction."""
        layers = self.layers
        trained = [leaf for leaf in layers if leaf.slot is not None]
        at_use = bool(layers) and not layers[0].gathering.is_done
        if choice is not None:
            places = {own: self._place(own) for own in choice.passed.values()}
            passed = {number: places[own] for number, own in choice.passed.items()}
            how = how | {"passed": passed}

        def gather(shards: Sequence[jax.Array]) -> list[jax.Array]:
            return [leaf.gathered(x) for leaf, x in zip(layers, shards, strict=True)]

        def reduce(grads: Sequence[jax.Array], number: Any) -> list[jax.Array]:
            pairs = zip(trained, grads, strict=True)
            return [leaf.reduced(x, number) for leaf, x in pairs]

        return LayerLoop(
            body=body,
            gather=gather,
            reduce=reduce,
            **how,
            ahead=at_use and layers[0].gathering.ahead,
            keep=at_use and layers[0].gathering.keep,
            numbered=any(leaf.store is not None for leaf in layers),
        )


def _packed(value: Any) -> Any:
    return value.arrays if isinstance(value, GatheredAtUse) else value


def _unpacked(values: Sequence[Any], packed: Sequence[Any]) -> list[Any]:
    """Replace the arrays of `values` by `packed`."""
    return [
        value.rebuilt(arrays, value.leaf_sharding)
        if isinstance(value, GatheredAtUse)
        else arrays
        for value, arrays in zip(values, packed, strict=True)
    ]


_RULES: dict[str, Callable[[core.JaxprEqn, Sequence[Any]], list[Any]]] = {
    "jit": _inline,
    "pjit": _inline,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
}
