"""When is a parameter gathered: where the loss function first uses it.

A loss function is written for unsharded parameters; at ZeRO 3 they are shards.
`call_gathering_at_use` traces the function to a jaxpr and evaluates it with
`GatheredAtUse` leaves in place of the parameters. The first equation that needs one
gathers it. A leaf that a scan slices layer by layer is sliced as a shard and gathered
in the scan's body, so one layer is gathered at a time and its gradient is reduced
there too. ZeRO 2 gathers once a step and uses the same leaves to reduce gradients every
micro-batch. Works for any model, without changes to the user's code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.jaxprs.compat import scan_counts
from jaxpar.jaxprs.evaluate import bind_in_scope, read, scope_of
from jaxpar.jaxprs.residuals import with_own_residuals
from jaxpar.sharding.collectives import Collectives
from jaxpar.sharding.leaf_sharding import LeafSharding

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
        "broadcast_in_dim",
        "name",
        "copy",
    }
)

_CALLS = {"custom_vjp_call": "call_jaxpr", "shard_map": "jaxpr"}
"""Call primitive -> the parameter that holds the called jaxpr."""


class GatheredAtUse:
    """A parameter that is gathered when it is first used.

    Args:
      leaf: its sharding.
      slot: the array to differentiate with respect to: has the shape of the stored view
        and the dtype of the reduction. Its values are not read. None for a leaf that
        is not trained.
      source: the stored fp32 view, or the leaf already gathered.
      collectives: gather the leaf and reduce its gradient.
      dtype: the compute dtype.
      is_whole: whether the source is the gathered leaf.
    """

    def __init__(
        self,
        leaf: LeafSharding,
        slot: jax.Array | None,
        source: jax.Array,
        collectives: Collectives,
        dtype: jnp.dtype,
        *,
        is_whole: bool,
    ):
        self.leaf_sharding, self.slot, self.source = leaf, slot, source
        self.collectives, self.dtype, self.is_whole = collectives, dtype, is_whole
        self._made: jax.Array | None = None

    @property
    def arrays(self) -> tuple[jax.Array | None, jax.Array]:
        """The arrays to pass through a transformation."""
        return self.slot, self.source

    def rebuilt(
        self, arrays: tuple[jax.Array | None, jax.Array], leaf: LeafSharding
    ) -> "GatheredAtUse":
        """The same leaf (or a slice of it) with other tracers."""
        slot, source = arrays
        return GatheredAtUse(
            leaf, slot, source, self.collectives, self.dtype, is_whole=self.is_whole
        )

    def make(self) -> jax.Array:
        """The gathered leaf in the compute dtype; gathered once."""
        if self._made is None:
            self._made = self._use()(*self.arrays)
        return self._made

    def _use(self) -> Callable[[jax.Array | None, jax.Array], jax.Array]:
        """``use(slot, source) -> leaf``; its backward pass reduces into the slot."""
        leaf, collectives, slot = self.leaf_sharding, self.collectives, self.slot

        def make(_: jax.Array | None, source: jax.Array) -> jax.Array:
            if self.is_whole:
                return source
            return collectives.gather(leaf, source.astype(self.dtype))

        if slot is None:
            return make
        slot_dtype = slot.dtype

        def forward(slot: jax.Array, source: jax.Array) -> tuple[jax.Array, None]:
            # Not a call of `use`: a scan would not recognise its result, and would
            # save a second stack of all layers for the backward pass.
            return make(slot, source), None

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, None]:
            return collectives.reduce(leaf, cotangent).astype(slot_dtype), None

        use = jax.custom_vjp(make)
        use.defvjp(forward, backward)
        return use


def call_gathering_at_use(
    fn: Callable[..., Any], leaves: Sequence[GatheredAtUse], *args: Any
) -> Any:
    """Evaluate ``fn(leaves, *args)``, gathering each leaf at its first use.

    Args:
      fn: takes a list of unsharded leaves and pytrees of arrays; returns a pytree.
      leaves: the leaves, not gathered yet.
      *args: the other arguments.

    Returns:
      What `fn` returns. Where leaves are gathered at use, the backward pass gathers
      them again: they are never residuals.
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

    if not all(leaf.is_whole for leaf in leaves):
        body = jax.checkpoint(body, policy=_refuse_layout_ops)
    outs = body([leaf.arrays for leaf in leaves], flat_args)
    # A constant output is a NumPy literal in the jaxpr.
    outs = [jnp.asarray(out) for out in outs]
    return jax.tree.unflatten(jax.tree.structure(out_shape), outs)


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
        _made(value) if _is_used_whole(closed.jaxpr, var) else value
        for var, value in zip(closed.jaxpr.invars, ins, strict=True)
    ]

    def body(packed: list) -> list:
        return _evaluate(closed, _unpacked(ins, packed))

    run = jax.checkpoint(
        body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
    )
    return with_own_residuals(run)([_packed(x) for x in ins])


def _is_used_whole(jaxpr: core.Jaxpr, var: core.Var) -> bool:
    """Whether anything but slicing scans reads a variable."""

    def reads_whole(eqn: core.JaxprEqn, position: int) -> bool:
        if eqn.primitive.name == "scan":
            return position < sum(scan_counts(eqn.params))
        if eqn.primitive.name not in _RULES:
            return True
        inner = eqn.params["jaxpr"]
        inner = getattr(inner, "jaxpr", inner)
        return _is_used_whole(inner, inner.invars[position])

    return any(atom is var for atom in jaxpr.outvars) or any(
        atom is var and reads_whole(eqn, position)
        for eqn in jaxpr.eqns
        for position, atom in enumerate(eqn.invars)
    )


def _scan(eqn: core.JaxprEqn, ins: Sequence[Any]) -> list[jax.Array]:
    """Slice leaves layer by layer as shards; gather those that can't be sliced."""
    num_consts, num_carry = scan_counts(eqn.params)
    consts = [_made(x) for x in ins[:num_consts]]
    init = [_made(x) for x in ins[num_consts : num_consts + num_carry]]
    xs = [_sliceable(x) for x in ins[num_consts + num_carry :]]
    slices = [_sliced(x) for x in xs]

    def body(carry: list, packed: list) -> tuple[list, list]:
        layer = _unpacked(xs, packed, slices)
        outs = _evaluate(eqn.params["jaxpr"], [*consts, *carry, *layer])
        return outs[:num_carry], outs[num_carry:]

    if any(isinstance(x, GatheredAtUse) and not x.is_whole for x in xs):
        # Otherwise every gathered layer is saved, as one stack of residuals.
        body = jax.checkpoint(body, policy=_refuse_layout_ops, prevent_cse=False)
    carry, ys = jax.lax.scan(
        body,
        init,
        [_packed(x) for x in xs],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _sliced(value: Any) -> LeafSharding | None:
    return (
        value.leaf_sharding.without_leading_dim()
        if isinstance(value, GatheredAtUse)
        else None
    )


def _sliceable(value: Any) -> Any:
    if isinstance(value, GatheredAtUse) and _sliced(value) is None:
        return value.make()
    return value


def _packed(value: Any) -> Any:
    return value.arrays if isinstance(value, GatheredAtUse) else value


def _unpacked(
    values: Sequence[Any],
    packed: Sequence[Any],
    leaf_shardings: Sequence[Any] | None = None,
) -> list[Any]:
    """Replace the arrays of `values` by the tracers of `packed`."""
    leaf_shardings = leaf_shardings or [
        v.leaf_sharding if isinstance(v, GatheredAtUse) else None for v in values
    ]
    return [
        value.rebuilt(arrays, leaf) if isinstance(value, GatheredAtUse) else arrays
        for value, arrays, leaf in zip(values, packed, leaf_shardings, strict=True)
    ]


_RULES: dict[str, Callable[[core.JaxprEqn, Sequence[Any]], list[Any]]] = {
    "jit": _inline,
    "pjit": _inline,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
}
