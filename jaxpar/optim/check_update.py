"""Does an optimizer's own `Update` keep what the interface promises, on shapes?

A step that returns the state in another form than it takes would compile again, or
fail far from its cause. What can be seen without running anything is checked here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.mesh import on_abstract_mesh
from jaxpar.step.reduction import Reduction
from jaxpar.step.update import HostUpdate, Update, UpdateSpec
from jaxpar.types import PyTree


def check_update(update: Any, spec: UpdateSpec) -> None:
    """Trace the methods of an update on shapes, and check their results.

    Args:
      update: what the optimizer's ``make_update`` returned.
      spec: what it was made from.

    Raises:
      TypeError: if it is not an `Update`.
      ValueError: if unpacking a packed state doesn't give the logical one, parameters
        to compute with have other names or shapes, the shardings don't fit the packed
        state, or a step changes its form. The message names the method and the leaf.
    """
    name = type(update).__name__
    if not isinstance(update, Update):
        raise TypeError(
            f"optimizer: its make_update returned a {name}, which is not an update; "
            "derive its class from jaxpar.optim.Update, and give it apply."
        )
    if not isinstance(update.reduction, Reduction):
        raise TypeError(
            f"optimizer: {name}.reduction is {update.reduction!r}, which is not a "
            "reduction; derive its class from jaxpar.optim.Reduction, or leave it out."
        )
    logical = spec.params, spec.opt_state
    with on_abstract_mesh(spec.mesh):
        packed = jax.eval_shape(update.pack, *logical)
        back = jax.eval_shape(update.unpack, *packed)
        unpacks = f"{name}.unpack", "`pack` took"
        require_same(*unpacks, _named_parts(logical), _named_parts(back))
        alone = jax.eval_shape(lambda x: update.unpack(x, ())[0], packed[0])
        require_same(*unpacks, {"params": spec.params}, {"params": alone})
        computed = jax.eval_shape(update.compute_params, packed[0])
        anyhow = tree.with_dtype(computed, jnp.dtype(jnp.float32))
        anyhow = _with_fetched(update, spec, anyhow)
        computes = f"{name}.compute_params", "the model has"
        require_same(*computes, {"params": spec.params}, {"params": anyhow})
        stepped = jax.eval_shape(
            lambda *given: _step(update, *given), _gradients(update, spec), *packed
        )
    applies = f"{name}.apply", "it takes"
    require_same(*applies, _named_parts(packed), _named_parts(stepped))
    _check_shardings(name, update, spec, packed)


def _with_fetched(update: Update, spec: UpdateSpec, params: PyTree) -> PyTree:
    """Parameters with those that are in no array; `layer_stores` are of them."""
    leaves, structure = jax.tree.flatten(params)
    whole = jax.tree.leaves(spec.params)
    for number in update.layer_stores():
        leaves[number] = whole[number]
    return jax.tree.unflatten(structure, leaves)


def _gradients(update: Update, spec: UpdateSpec) -> PyTree:
    """The shapes of the gradients that it gets."""
    shapes = map(update.reduction.gradient_shape, spec.leaf_shardings)
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.tree.unflatten(jax.tree.structure(spec.params), structs)


def _step(update: Update, grads: PyTree, params: PyTree, opt_state: PyTree) -> PyTree:
    """The state after a step."""
    one, yes = jnp.float32(1), jnp.bool_(True)
    given = update.pack_grads(grads), params, opt_state
    params, opt_state, _ = update.apply(*given, factor=one, applied=yes, loss=one)
    return params, opt_state


def _check_shardings(
    name: str, update: Update, spec: UpdateSpec, packed: PyTree
) -> None:
    """Check that there is a sharding for every leaf of the packed state."""
    stored = [NamedSharding(spec.mesh, x.stored_spec) for x in spec.leaf_shardings]
    params = jax.tree.unflatten(jax.tree.structure(spec.params), stored)
    # Which spec an optimizer's leaf has is decided later; here only the form counts.
    others = jax.tree.map(lambda _: NamedSharding(spec.mesh, P()), spec.opt_state)
    logical = update.logical_shardings(params, others)
    places = _named_parts(update.shardings(*logical))
    _require_places(f"{name}.shardings", _named_parts(packed), places)
    if isinstance(update, HostUpdate):
        grads = jax.eval_shape(update.pack_grads, _gradients(update, spec))
        places = {"grads": update.grads_shardings(logical[0])}
        _require_places(f"{name}.grads_shardings", {"grads": grads}, places)


def _require_places(method: str, arrays: PyTree, places: PyTree) -> None:
    """Check that there is a sharding for every array, which divides it."""
    leaves, found = tree.named_leaves(arrays), tree.named_leaves(places)
    _require_names(method, "the packed arrays have", leaves, found)
    _require_structure(method, "the packed arrays have", arrays, places)
    for name, place in found.items():
        leaf = leaves[name]
        try:
            fits = isinstance(place, NamedSharding) and place.shard_shape(leaf.shape)
        except ValueError:
            fits = False
        if fits is False:
            raise ValueError(
                f"optimizer: {method} returns {place} for leaf {name} of shape "
                f"{leaf.shape}; it must be a NamedSharding whose axes divide the leaf."
            )


def require_same(method: str, than: str, expected: PyTree, found: PyTree) -> None:
    """Check that a method returns the leaves that it should.

    Args:
      method: its name, for the message.
      than: who has the expected leaves, such as "it takes".
      expected: arrays or shapes.
      found: likewise.

    Raises:
      ValueError: if names, structure, shapes or dtypes differ; it names the leaf.
    """
    old, new = tree.named_leaves(expected), tree.named_leaves(found)
    _require_names(method, than, old, new)
    _require_structure(method, than, expected, found)
    for name, leaf in old.items():
        if (leaf.shape, leaf.dtype) != (new[name].shape, new[name].dtype):
            raise ValueError(
                f"optimizer: {method} returns leaf {name} as {_kind(new[name])}, but "
                f"{than} {_kind(leaf)}."
            )


def _require_names(method: str, than: str, old: dict, new: dict) -> None:
    more, less = ([n for n in a if n not in b][:3] for a, b in ((new, old), (old, new)))
    if more or less:
        raise ValueError(
            f"optimizer: {method} returns other leaves than {than}: new {more}, "
            f"missing {less}."
        )


def _require_structure(method: str, than: str, expected: PyTree, found: PyTree) -> None:
    before, after = jax.tree.structure(expected), jax.tree.structure(found)
    if before != after:
        raise ValueError(
            f"optimizer: {method} returns another structure than {than}: {after} for "
            f"{before}."
        )


def _named_parts(state: tuple[PyTree, PyTree]) -> dict[str, PyTree]:
    return dict(zip(("params", "opt_state"), state, strict=True))


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
