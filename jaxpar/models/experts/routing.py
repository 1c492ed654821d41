"""Which experts does a token go to, and how evenly are they used?"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.sharding.exchange import batch_mean


class Routing(NamedTuple):
    """What a router decides.

    Attributes:
      experts: [N, K], of each token, the most probable first; the number of experts for
        a token that is padding.
      gates: [N, K], factors of their updates, fp32.
      logits: [N, E], the router's, fp32.
    """

    experts: Int[Array, "N K"]
    gates: Float[Array, "N K"]
    logits: Float[Array, "N E"]


class RouterStatistics(NamedTuple):
    """How the experts of a block are used, over all rows of a micro-batch.

    Attributes:
      balance: E times the sum over experts of the share of tokens that go to one times
        its mean probability: the load-balance loss, top_k at its smallest.
      router_z: mean squared log of the sum of exponentials of the router's logits.
      largest_load: of an expert, in units of the mean.
      dropped: share of the choices that no expert takes.
    """

    balance: Float[Array, ""]
    router_z: Float[Array, ""]
    largest_load: Float[Array, ""]
    dropped: Float[Array, ""]


def route(
    logits_NE: Float[Array, "N E"],
    top_k: int,
    *,
    normalise: bool = True,
    is_token_N: Bool[Array, "N"] | None = None,
) -> Routing:
    """Choose the most probable experts of each token.

    Args:
      logits_NE: the router's, fp32.
      top_k: experts of a token.
      normalise: whether a token's gates are divided by their sum.
      is_token_N: False for padding, which goes to no expert; None for all True.

    Returns:
      The experts and their gates.

    Example:
      >>> found = route(jnp.array([[0.0, 2.0, 1.0]]), 2)
      >>> found.experts.tolist()
      [[1, 2]]

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017). Differs: the
    softmax is over all experts, before the choice, as in Fedus et al., "Switch
    Transformers" (2021).
    """
    gates_NK, experts_NK = jax.lax.top_k(jax.nn.softmax(logits_NE), top_k)
    if normalise:
        gates_NK = gates_NK / gates_NK.sum(-1, keepdims=True)
    if is_token_N is not None:
        nowhere = logits_NE.shape[-1]
        experts_NK = jnp.where(is_token_N[:, None], experts_NK, nowhere)
    return Routing(experts_NK, gates_NK, logits_NE)


def statistics_of(
    routing: Routing, is_kept_NK: Bool[Array, "N K"] | None = None
) -> RouterStatistics:
    """Count how the experts are used, over all rows of the micro-batch.

    Sums are averaged over the shards of the micro-batch's rows
    (`jaxpar.batch_mean`), in one call.

    Args:
      routing: of the rows that the caller sees.
      is_kept_NK: which choices an expert takes; None for all.

    Returns:
      The statistics, the same on every shard.

    Source: Fedus et al., "Switch Transformers" (2021), equations 4 to 6, for the
    balance (with top_k choices a token); Zoph et al., "ST-MoE" (2022), equation 5, for
    z.
    """
    E, top_k = routing.logits.shape[-1], routing.experts.shape[-1]
    chosen_NKE = jax.nn.one_hot(routing.experts, E, dtype=jnp.float32)
    is_token_N = (routing.experts[:, 0] < E).astype(jnp.float32)
    probs_NE = jax.nn.softmax(routing.logits) * is_token_N[:, None]
    z_N = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1)) * is_token_N
    taken_NK = chosen_NKE.sum(-1)
    kept_NK = taken_NK if is_kept_NK is None else taken_NK * is_kept_NK
    # One array, and so one collective.
    rest = jnp.stack([z_N.sum(), kept_NK.sum(), is_token_N.sum()])
    sums = jnp.concatenate([chosen_NKE.sum((0, 1)), probs_NE.sum(0), rest])
    sums = batch_mean(sums)
    count = jnp.maximum(sums[-1], 1e-9)
    load_E, importance_E = sums[:E] / count, sums[E : 2 * E] / count
    return RouterStatistics(
        balance=E * (load_E * importance_E).sum(),
        router_z=sums[-3] / count,
        largest_load=load_E.max() * E / top_k,
        dropped=1 - sums[-2] / (count * top_k),
    )
