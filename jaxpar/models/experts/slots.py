"""Where does each token's choice of an expert stand: dispatch and return as gathers.

A choice is one of a token's experts. Experts read rows of slots. Two maps, slot ->
choice and choice -> slot, make both directions gathers, and their gradients too: a
scatter would be slow, and on GPUs not deterministic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class ChoiceSlots(NamedTuple):
    """The places of choices.

    Attributes:
      slot_of_choice: [N, K]; the number of slots for a choice that has none.
      choice_of_slot: [S]; the number of choices for an empty slot.
    """

    slot_of_choice: Int[Array, "N K"]
    choice_of_slot: Int[Array, "S"]

    @property
    def is_kept(self) -> Bool[Array, "N K"]:
        """Which choices have a slot."""
        return self.slot_of_choice < self.choice_of_slot.shape[0]


class Tiles(NamedTuple):
    """ChoiceSlots in tiles, each of one expert's choices.

    Attributes:
      slots: M tiles of T slots each.
      experts: [M], the expert of each tile.
      is_used: [M], whether it has choices.
    """

    slots: ChoiceSlots
    experts: Int[Array, "M"]
    is_used: Bool[Array, "M"]


def slots_by_capacity(
    experts_NK: Int[Array, "N K"], num_experts: int, capacity: int
) -> ChoiceSlots:
    """Give each expert so many slots; first choices of all tokens come first.

    Args:
      experts_NK: the experts of each token; `num_experts` for none.
      num_experts: E.
      capacity: C, slots of an expert.

    Returns:
      E x C slots, an expert's side by side.

    Example:
      >>> slots_by_capacity(jnp.array([[0], [0], [1]]), 2, 1).is_kept[:, 0].tolist()
      [True, False, True]

    Source: Lepikhin et al., "GShard" (2020), algorithm 1.
    """
    top_k = experts_NK.shape[1]
    flat = experts_NK.T.reshape(-1)
    rank = _rank(flat, num_experts)
    size = num_experts * capacity
    is_kept = (flat < num_experts) & (rank < capacity)
    slot = jnp.where(is_kept, flat * capacity + rank, size)
    return _slots(slot.reshape(top_k, -1).T, size)


def slots_by_tiles(experts_NK: Int[Array, "N K"], num_experts: int, tile: int) -> Tiles:
    """Give every choice a slot, and each expert whole tiles.

    Args:
      experts_NK: the experts of each token; `num_experts` for none.
      num_experts: E.
      tile: T, slots of a tile.

    Returns:
      As many tiles as any choice can need, N K / T + E.
    """
    flat = experts_NK.reshape(-1)
    num_tiles = -(-flat.size // tile) + num_experts
    counts_E = (flat[:, None] == jnp.arange(num_experts)).sum(0)
    ends_E = jnp.cumsum(-(-counts_E // tile))
    first_E = tile * jnp.concatenate([jnp.zeros(1, ends_E.dtype), ends_E[:-1]])
    size = num_tiles * tile
    first = jnp.append(first_E, size)[jnp.minimum(flat, num_experts)]
    slot = jnp.minimum(first + _rank(flat, num_experts), size)
    numbers = jnp.arange(num_tiles)
    expert_M = jnp.searchsorted(ends_E, numbers, side="right")
    expert_M = jnp.minimum(expert_M, num_experts - 1)
    slots = _slots(slot.reshape(experts_NK.shape), size)
    return Tiles(slots, expert_M, numbers < ends_E[-1])


def to_slots(x_ND: Float[Array, "N D"], slots: ChoiceSlots) -> Float[Array, "S D"]:
    """Bring tokens to the slots of their choices; empty slots are zeros."""
    return _to_slots(x_ND, slots)


def from_slots(y_SD: Float[Array, "S D"], slots: ChoiceSlots) -> Float[Array, "N K D"]:
    """Bring the slots' rows back to the choices; zeros for those without a slot."""
    return _from_slots(y_SD, slots)


def _rank(experts: jax.Array, num_experts: int) -> jax.Array:
    """The number of choices of the same expert before each, by one stable sort."""
    order = jnp.argsort(experts, stable=True)
    in_order = experts[order]
    first = jnp.searchsorted(in_order, jnp.arange(num_experts + 1), side="left")
    rank = jnp.arange(experts.size) - first[in_order]
    return jnp.zeros_like(rank).at[order].set(rank, unique_indices=True)


def _slots(slot_NK: jax.Array, size: int) -> ChoiceSlots:
    flat = slot_NK.reshape(-1)
    empty = jnp.full(size, flat.size, slot_NK.dtype)
    numbers = jnp.arange(flat.size, dtype=slot_NK.dtype)
    return ChoiceSlots(slot_NK, empty.at[flat].set(numbers, mode="drop"))


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _to_slots(x_ND: jax.Array, slots: ChoiceSlots) -> jax.Array:
    # An empty slot's choice is N K, and so its token N, which is beyond x.
    return _rows(x_ND, slots.choice_of_slot // slots.slot_of_choice.shape[1])


def _to_slots_backward(
    slots: ChoiceSlots, grad_SD: jax.Array
) -> tuple[jax.Array, None]:
    by_choice_NKD = _rows(grad_SD, slots.slot_of_choice)
    wide = by_choice_NKD.astype(jnp.promote_types(grad_SD.dtype, jnp.float32))
    return wide.sum(1).astype(grad_SD.dtype), None


_to_slots.defvjp(lambda x, slots: (_to_slots(x, slots), slots), _to_slots_backward)


@jax.custom_vjp
def _from_slots(y_SD: jax.Array, slots: ChoiceSlots) -> jax.Array:
    return _rows(y_SD, slots.slot_of_choice)


def _from_slots_backward(
    slots: ChoiceSlots, grad_NKD: jax.Array
) -> tuple[jax.Array, None]:
    flat = grad_NKD.reshape(-1, grad_NKD.shape[-1])
    return _rows(flat, slots.choice_of_slot), None


_from_slots.defvjp(
    lambda y, slots: (_from_slots(y, slots), slots), _from_slots_backward
)
