"""Which activations are saved for the backward pass, and which are recomputed?

A policy has a name, which is the same in a config, a command line and a report;
`jax.checkpoint` implements it.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import jax

from jaxpar.tree import near_match

REMAT_POLICIES = ("none", "full", "dots", "save-names")

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")


def check_policy(policy: str, names: Sequence[str]) -> None:
    """Check a policy's name and the names that go with it.

    Args:
      policy: one of `REMAT_POLICIES`.
      names: names given to `jax.ad_checkpoint.checkpoint_name`.

    Raises:
      ValueError: if the policy is unknown, if "save-names" comes without names, or
        if another policy comes with names.
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
    if policy != "save-names" and names:
        raise ValueError(
            f"remat: names={tuple(names)!r} must be empty under policy={policy!r}; "
            "drop them, or use policy='save-names'."
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
    `jax.ad_checkpoint.checkpoint_name`, if their labels are in `names`.

    Args:
      fn: a function of arrays; arrays it closes over count as inputs.
      policy: one of `REMAT_POLICIES`.
      names: labels to save; for "save-names" only.
      prevent_cse: keep the compiler from merging the recomputation with the forward
        pass. False is right, and faster, in the body of a `jax.lax.scan` that stays a
        loop.

    Returns:
      A function of the same signature; `fn` itself under "none".

    Raises:
      ValueError: if the policy is unknown, if "save-names" comes without names, or
        if another policy comes with names.

    Example:
      >>> import jax.numpy as jnp
      >>> jax.grad(remat(lambda x: jnp.sin(x) ** 2, "full"))(0.0)
      Array(0., dtype=float32, weak_type=True)
    """
    check_policy(policy, names)
    if policy == "none":
        return fn
    saveable = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "save-names": jax.checkpoint_policies.save_only_these_names(*names),
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

    Args:
      block: a function of arrays; it is traced at each call.
      policy: as in `remat`.
      names: as in `remat`.
      prevent_cse: as in `remat`.

    Returns:
      A function of the same signature.
    """
    if policy == "none":
        return remat(block, policy, names=names)

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
