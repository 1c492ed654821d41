"""Does every choice get its slot, and every slot its choice?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.experts.slots import (
    from_slots,
    slots_by_capacity,
    slots_by_tiles,
    to_slots,
)

N, K, E = 23, 2, 4


def choices(seed: int = 0, nowhere: float = 0.2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.array([rng.permutation(E)[:K] for _ in range(N)])
    found[rng.random(N) < nowhere] = E
    return found.astype(np.int32)


def check_maps(slots, experts: np.ndarray) -> None:
    """Both maps say the same."""
    slot, choice = np.asarray(slots.slot_of_choice), np.asarray(slots.choice_of_slot)
    for n, k in np.ndindex(N, K):
        if slot[n, k] < len(choice):
            assert choice[slot[n, k]] == n * K + k
    used = choice[choice < N * K]
    assert len(set(used.tolist())) == len(used) == (slot < len(choice)).sum()
    assert not (slot[experts == E] < len(choice)).any()


@pytest.mark.parametrize("capacity", [1, 5, 20])
def test_capacity_takes_first_choices_of_the_first_tokens(capacity: int) -> None:
    experts = choices()
    slots = slots_by_capacity(jnp.asarray(experts), E, capacity)
    check_maps(slots, experts)
    taken: dict[int, int] = {}
    for k in range(K):
        for n in range(N):
            own = int(experts[n, k])
            place = taken.setdefault(own, 0)
            is_kept = own < E and place < capacity
            assert bool(slots.is_kept[n, k]) == is_kept
            if is_kept:
                assert int(slots.slot_of_choice[n, k]) == own * capacity + place
            taken[own] += 1


@pytest.mark.parametrize("tile", [1, 4, 64])
@pytest.mark.parametrize("seed", range(3))
def test_tiles_have_one_expert_and_all_choices(tile: int, seed: int) -> None:
    experts = choices(seed)
    tiles = slots_by_tiles(jnp.asarray(experts), E, tile)
    check_maps(tiles.slots, experts)
    slot = np.asarray(tiles.slots.slot_of_choice)
    for n, k in np.ndindex(N, K):
        if experts[n, k] < E:
            number = slot[n, k] // tile
            assert tiles.experts[number] == experts[n, k]
            assert tiles.is_used[number]
    counts = np.bincount(experts[experts < E], minlength=E)
    assert int(tiles.is_used.sum()) == sum(-(-counts // tile))


def test_all_choices_may_be_of_one_expert() -> None:
    experts = np.full((N, 1), 3, np.int32)
    tiles = slots_by_tiles(jnp.asarray(experts), E, 4)
    assert bool(tiles.slots.is_kept.all())
    assert int(tiles.is_used.sum()) == -(-N // 4)


def test_rows_go_there_and_back_and_so_do_their_gradients() -> None:
    experts = choices()
    slots = slots_by_capacity(jnp.asarray(experts), E, 5)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(N, 3)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(N, K, 3)), jnp.float32)
    of_slots = jnp.asarray(rng.normal(size=(E * 5, 1)), jnp.float32)

    def through(x: jax.Array) -> jax.Array:
        return (from_slots(to_slots(x, slots) * of_slots, slots) * weights).sum()

    def plainly(x: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for n, k in np.ndindex(N, K):
            slot = int(slots.slot_of_choice[n, k])
            if slot < E * 5:
                total += (x[n] * of_slots[slot] * weights[n, k]).sum()
        return total

    for own, right in zip(
        jax.value_and_grad(through)(x), jax.value_and_grad(plainly)(x), strict=True
    ):
        np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-5)
    program = str(jax.make_jaxpr(jax.grad(through))(x))
    assert "scatter" not in program
