"""Which activations are saved for the backward pass, and which are recomputed?

A policy has a name, which is the same in a config, a command line and a report;
`jax.checkpoint` implements it.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.mesh import DATA, TENSOR
from jaxpar.sharding.constrain import constrain
from jaxpar.tree import near_match
from jaxpar.types import PyTree

REMAT_POLICIES = ("none", "full", "dots", "save-names", "offload")

BLOCK_INPUT = "block_input"
"""The label of what a block of a section is given, under "offload"."""

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")


def check_policy(policy: str, names: Sequence[str]) -> None:
    """Check a policy's name and the names that go with it.

    Args:
      policy: one of `REMAT_POLICIES`.
      names: names given to `jax.ad_checkpoint.checkpoint_name`.

    Raises:
      ValueError: if the policy is unknown, if "save-names" comes without names, or if
        a policy that has no use for them comes with names.
    """
    if policy not in REMAT_POLICIES:
        raise ValueError(
            f"remat: policy={policy!r} must be one of "
            f"{', '.join(map(repr, REMAT_POLICIES))}."
            f"{near_match(policy, REMAT_POLICIES)}"
        )
    if policy == "save-names" and not names:
        raise ValueError(
            "remat: policy='save-names' with names=() would save nothing; give the "
            "checkpoint_name labels to save, or use policy='full'."
        )
    if policy not in ("save-names", "offload") and names:
        raise ValueError(
            f"remat: names={tuple(names)!r} must be empty under policy={policy!r}; "
            "drop them, or use policy='save-names' or 'offload'."
        )


def remat(
    fn: Callable[_Inputs, _Output],
    policy: str,
    *,
    names: Sequence[str] = (),
    prevent_cse: bool = True,
) -> Callable[_Inputs, _Output]:
    """Make a function's backward pass recompute what the policy does not save.

    The result is the same function with the same gradients; only memory and time
    differ. "none" saves what differentiation needs; "full" saves the inputs alone;
    "dots" saves the results of matmuls without batch dims (projections, not
    attention scores); "save-names" saves the values that the function labels with
    `jax.ad_checkpoint.checkpoint_name`, if their labels are in `names`; "offload" saves
    these in the host's memory, from where the backward pass reads them.

    Args:
      fn: a function of arrays; arrays it closes over count as inputs.
      policy: one of `REMAT_POLICIES`.
      names: labels to save; for "save-names" and "offload" only.
      prevent_cse: keep the compiler from merging the recomputation with the forward
        pass. False is right, and faster, in the body of a `jax.lax.scan` that stays a
        loop.

    Returns:
      A function of the same signature; `fn` itself under "none".

    Raises:
      ValueError: if the policy is unknown, if "save-names" or "offload" comes without
        names, or if another policy comes with names.

    Example:
      >>> import jax.numpy as jnp
      >>> jax.grad(remat(lambda x: jnp.sin(x) ** 2, "full"))(0.0)
      Array(0., dtype=float32, weak_type=True)
    """
    check_policy(policy, names)
    if policy == "none":
        return fn
    if policy == "offload" and not names:
        raise ValueError(
            "remat: policy='offload' with names=() would move nothing to the host; "
            "give the checkpoint_name labels of what is to be stored there."
        )
    policies = jax.checkpoint_policies
    saveable = {
        "full": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "save-names": policies.save_only_these_names(*names),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[policy]
    return jax.checkpoint(fn, policy=saveable, prevent_cse=prevent_cse)


def remat_block(
    block: Callable[_Inputs, _Output],
    policy: str,
    *,
    names: Sequence[str] = (),
    prevent_cse: bool = True,
) -> Callable[_Inputs, _Output]:
    """As `remat`, for a block of a loop, whose result may have some of its inputs.

    What a block passes on as it got it, such as an encoder's output, is taken from its
    inputs. So a loop sees that it does not change, and stores it once: as a result of
    what is recomputed, it would be stored for every block.

    Under "offload" what it is given to compute with is labelled, and stored on the
    host.

    Args:
      block: ``(variables, hidden, ...) -> (hidden, ...)``, a function of arrays; it is
        traced at each call.
      policy: as in `remat`; "offload" needs no names.
      names: as in `remat`.
      prevent_cse: as in `remat`.

    Returns:
      A function of the same signature.
    """
    if policy == "none":
        return remat(block, policy, names=names)
    if policy == "offload":
        block, names = _of_labelled(block), (BLOCK_INPUT, *names)

    def run(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> _Output:
        passed: dict[int, int] = {}

        def noting(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> _Output:
            out = block(*args, **kwargs)
            given = [id(leaf) for leaf in jax.tree.leaves((args, kwargs))]
            for place, leaf in enumerate(jax.tree.leaves(out)):
                if id(leaf) in given:
                    passed[place] = given.index(id(leaf))
            return out

        how = {"names": names, "prevent_cse": prevent_cse}
        out = remat(noting, policy, **how)(*args, **kwargs)
        leaves, treedef = jax.tree.flatten(out)
        given = jax.tree.leaves((args, kwargs))
        for place, source in passed.items():
            leaves[place] = given[source]
        return jax.tree.unflatten(treedef, leaves)

    return run


def _of_labelled(block: Callable[..., Any]) -> Callable[..., Any]:
    """A block whose input is labelled, but for what it passes on."""

    def run(variables: PyTree, hidden: PyTree, *others: Any) -> Any:
        passed = passed_on(lambda x: block(variables, x, *others)[0], hidden)
        return block(variables, label_inputs(hidden, passed), *others)

    return run


def label_inputs(tree: PyTree, passed: Collection[int]) -> PyTree:
    """Label the floating arrays of a block's input as `BLOCK_INPUT`.

    What is stored of an input [rows, tokens, ...] is split over the tensor axis, where
    that divides the tokens (Megatron-LM's partitioned activations).

    Args:
      tree: the input.
      passed: numbers of leaves that the block passes on as it got them, which are not
        labelled.
    """
    leaves, structure = jax.tree.flatten(tree)
    for number, leaf in enumerate(leaves):
        if number not in passed and jnp.issubdtype(leaf.dtype, jnp.floating):
            leaves[number] = _labelled(leaf)
    return jax.tree.unflatten(structure, leaves)


def _labelled(x: jax.Array) -> jax.Array:
    ways = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
    if ways == 1 or x.ndim < 3 or x.shape[1] % ways:
        return checkpoint_name(x, BLOCK_INPUT)
    return constrain(checkpoint_name(constrain(x, DATA, TENSOR), BLOCK_INPUT), DATA)


def passed_on(block: Callable[[PyTree], PyTree], given: PyTree) -> frozenset[int]:
    """Numbers of an input's leaves that a block returns as it got them; traces it."""
    found: set[int] = set()

    def noting(given: PyTree) -> PyTree:
        out = block(given)
        kept = {id(leaf) for leaf in jax.tree.leaves(out)}
        leaves = enumerate(jax.tree.leaves(given))
        found.update(number for number, leaf in leaves if id(leaf) in kept)
        return out

    jax.eval_shape(noting, given)
    return frozenset(found)
