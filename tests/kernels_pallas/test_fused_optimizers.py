"""Do fused optimizers do what optax does, in plain JAX, and their kernels the same?"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from kernels_pallas.fused_optimizers import (
    TILE,
    AdamW,
    Leaves,
    Lion,
    Numbers,
    Quantized,
    Rule,
    Updated,
    dequantize,
    fused_update,
    init_moments,
    quantize,
)
from tests.kernels_pallas.marks import needs_mosaic
from tests.kernels_pallas.races import watched

RULES: dict[str, Rule] = {
    "adamw": AdamW(),
    "adamw with eps_root": AdamW(0.8, 0.95, 1e-6, 1e-8),
    "lamb": AdamW(eps=1e-6, trust_ratio=True),
    "lion": Lion(),
}
EQUAL = {
    "adamw": optax.adamw(1e-3, weight_decay=0.1),
    "adamw with eps_root": optax.adamw(1e-3, 0.8, 0.95, 1e-6, 1e-8, weight_decay=0.1),
    "lamb": optax.lamb(1e-3, weight_decay=0.1),
    "lion": optax.lion(1e-3, weight_decay=0.1),
}
ELEMENTS, FIRST = 4 * TILE, 3 * TILE
LEAVES = Leaves(np.array([0, 0, 0, 1]), 2)
NUMBERS = Numbers(1e-3, count=7, factor=0.5)
SIGNED_ROOTS = Quantized(jnp.zeros(TILE, jnp.int8), jnp.zeros(1))


def bucket(seed: int, dtype: Any = jnp.float32) -> jax.Array:
    """Two leaves, the second of which is not whole tiles."""
    drawn = np.random.default_rng(seed).standard_normal(ELEMENTS)
    drawn[-100:] = 0
    return jnp.asarray(drawn, dtype)


def as_leaves(flat: jax.Array) -> list[jax.Array]:
    return [flat[:FIRST], flat[FIRST:-100]]


def trained(rule: Rule, bits: int, steps: int) -> tuple[jax.Array, dict, jax.Array]:
    """Parameters, moments and copies after some steps."""
    params, copies = bucket(0), bucket(0, jnp.bfloat16)
    moments = init_moments(rule, ELEMENTS, bits=bits)

    @jax.jit
    def step(params, moments, copies, grads, count):
        numbers = Numbers(1e-3, count, 0.5)
        options = {"decays": 0.1, "copies": copies, "leaves": LEAVES}
        new = fused_update(rule, params, grads, moments, numbers, **options)
        return new.params, new.moments, new.copies

    for count in range(1, steps + 1):
        params, moments, copies = step(params, moments, copies, bucket(count), count)
    return params, moments, copies


@pytest.mark.parametrize("name", RULES)
def test_hundred_steps_equal_optax(name: str) -> None:
    """To 1e-6 of the norm; LAMB's ratios are of leaves, not of buckets."""
    steps, optimizer = 100, EQUAL[name]
    leaves = as_leaves(bucket(0))
    state = optimizer.init(leaves)

    @jax.jit
    def step(leaves, state, grads):
        updates, state = optimizer.update([0.5 * g for g in grads], state, leaves)
        return optax.apply_updates(leaves, updates), state

    for count in range(1, steps + 1):
        leaves, state = step(leaves, state, as_leaves(bucket(count)))
    params, _, copies = trained(RULES[name], 32, steps)
    right = np.concatenate(leaves)
    difference = np.linalg.norm(params[:-100] - right)
    assert difference <= 1e-6 * np.linalg.norm(right)
    moved = np.linalg.norm(right - bucket(0)[:-100])
    assert difference <= 1e-5 * moved, "and not because nothing has moved"
    assert np.array_equal(copies, params.astype(jnp.bfloat16))
    assert not params[-100:].any(), "what fills a tile up stays 0"


def test_small_second_moments_do_not_become_0() -> None:
    """What is divided by them would explode."""
    moment = jnp.zeros(TILE).at[0].set(1.0).at[1].set(1e-30)
    found = dequantize("nu", quantize("nu", moment))
    assert found[1] > 0
    assert not found[2:].any()


@pytest.mark.parametrize("name", ["mu", "nu"])
def test_quantized_moments_are_kept_by_a_round_trip(name: str) -> None:
    moment = jnp.abs(bucket(3)) if name == "nu" else bucket(3)
    once = quantize(name, moment)
    again = quantize(name, dequantize(name, once))
    assert np.array_equal(once.codes, again.codes)
    np.testing.assert_allclose(again.scales, once.scales, rtol=1e-6)
    error = np.abs(dequantize(name, once) - moment)
    assert error.max() <= 0.5 / 63 * np.abs(moment).max()


@pytest.mark.parametrize(("name", "bits"), list(itertools.product(RULES, (8, 32))))
def test_step_that_does_not_count_changes_nothing(name: str, bits: int) -> None:
    rule = RULES[name]
    params, moments, copies = trained(rule, bits, 2)
    for_nothing = Numbers(1e-3, 3, applied=False)
    grads = jnp.full(ELEMENTS, jnp.nan)
    options = {"copies": copies, "leaves": LEAVES}
    new = jax.jit(functools.partial(fused_update, rule, **options))(
        params, grads, moments, for_nothing
    )
    before = jax.tree.leaves(Updated(params, moments, copies))
    for old, kept in zip(before, jax.tree.leaves(new), strict=True):
        assert np.array_equal(old, kept)


def test_numbers_of_tiles_are_added_up_for_each_leaf() -> None:
    """In several rounds where a leaf has more than 256 tiles; never by a scatter."""
    counts = np.array([3, 0, 70_000, 256, 257, 1])
    leaves = Leaves(np.repeat(np.arange(6), counts), 6)
    numbers = np.float32(np.random.default_rng(0).random(counts.sum()))
    total = jax.jit(leaves.total)
    right = [part.sum() for part in np.split(np.float64(numbers), np.cumsum(counts))]
    np.testing.assert_allclose(total(numbers), right[:6], rtol=1e-6)
    assert "scatter" not in total.lower(numbers).as_text()


def test_step_in_8_bits_has_the_length_that_ratios_say() -> None:
    """LAMB's steps are as long as the parameters, times the rate."""
    params = bucket(0)
    moments = init_moments(RULES["lamb"], ELEMENTS, bits=8)
    step = jax.jit(functools.partial(fused_update, RULES["lamb"], leaves=LEAVES))
    new = step(params, bucket(1), moments, Numbers(0.1, 1))
    for old, leaf in zip(as_leaves(params), as_leaves(new.params), strict=True):
        length = 0.1 * np.linalg.norm(old)
        assert np.linalg.norm(leaf - old) == pytest.approx(length, rel=1e-5)


@pytest.mark.parametrize("bits", [8, 32])
def test_first_moments_can_be_donated(bits: int) -> None:
    """Each is an array of its own."""
    moments = init_moments(AdamW(), ELEMENTS, bits=bits)
    step = jax.jit(functools.partial(fused_update, AdamW()), donate_argnums=(0, 2))
    new = step(bucket(0), bucket(1), moments, NUMBERS)
    assert np.isfinite(new.params).all()


def test_bucket_of_no_tiles_stays_one() -> None:
    nothing = jnp.zeros(0)
    moments = init_moments(AdamW(), 0)
    new = fused_update(AdamW(), nothing, nothing, moments, NUMBERS)
    assert new.params.size == new.moments["mu"].size == 0


def test_each_tile_has_its_own_decay() -> None:
    params, zeros = jnp.ones(2 * TILE), jnp.zeros(2 * TILE)
    moments = init_moments(Lion(), 2 * TILE)
    decays = np.array([0.0, 0.5])
    step = jax.jit(functools.partial(fused_update, Lion(), decays=decays))
    new = step(params, zeros, moments, Numbers(0.1, 1))
    assert new.params[:TILE] == pytest.approx(1.0)
    assert new.params[TILE:] == pytest.approx(0.95)


@needs_mosaic
@pytest.mark.parametrize(("name", "bits"), list(itertools.product(RULES, (8, 32))))
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("f4", marks=pytest.mark.slow)]
)
def test_kernel_does_what_plain_jax_does(
    name: str, bits: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Mosaic's CPU interpreter, without races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: PLC0415

    from kernels_pallas.fused_optimizers import mosaic  # noqa: PLC0415

    monkeypatch.setattr(mosaic, "run", watched(mosaic.run))
    rule = RULES[name]
    params, moments, copies = trained(rule, bits, 2)
    step = functools.partial(
        fused_update,
        *(rule, params, bucket(3, dtype), moments, NUMBERS),
        decays=np.array([0.1, 0.1, 0.1, 0.0]),
        copies=copies,
        leaves=LEAVES,
    )
    right = jax.jit(functools.partial(step, implementation="reference"))()
    found = step(interpret=plgpu.InterpretGPUParams(detect_races=True))
    tolerance = 2e-7 * float(np.abs(right.params).max())
    assert np.abs(found.params - right.params).max() <= tolerance
    assert np.array_equal(found.copies, found.params.astype(jnp.bfloat16))
    for moment in rule.moments:
        pair = [plain(moment, new.moments[moment]) for new in (found, right)]
        assert np.abs(pair[0] - pair[1]).max() <= 2e-7 * np.abs(pair[1]).max()
        if bits == 8:
            codes = [new.moments[moment].codes for new in (found, right)]
            assert np.array_equal(*codes), "to the bit"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "bits"), list(itertools.product(RULES, (8, 32))))
def test_kernel_on_a_gpu_does_what_plain_jax_does(name: str, bits: int) -> None:
    """A million elements, ten steps; roots beside codes are rounded otherwise.

    The sign of a mean that is 0 but for its rounding may be another: Lion's steps are
    then so in a few elements.
    """
    rule, tiles = RULES[name], 1000
    leaves = Leaves(np.arange(tiles) // 7, -(-tiles // 7))

    @functools.partial(jax.jit, static_argnames="implementation", donate_argnums=0)
    def step(state, grads, count, implementation):
        params, moments, copies = state
        options = {"copies": copies, "leaves": leaves, "decays": 0.1}
        options["implementation"] = implementation
        numbers = Numbers(1e-3, count, 0.5)
        new = fused_update(rule, params, grads, moments, numbers, **options)
        return new.params, new.moments, new.copies

    found = {}
    for implementation in ("mosaic", "reference"):
        keys = jax.random.split(jax.random.key(0), 11)
        params = jax.random.normal(keys[10], (tiles * TILE,))
        moments = init_moments(rule, tiles * TILE, bits=bits)
        state = params, moments, params.astype(jnp.bfloat16)
        for count, key in enumerate(keys[:10], 1):
            grads = jax.random.normal(key, (tiles * TILE,), jnp.bfloat16)
            state = step(state, grads, count, implementation)
        found[implementation] = jax.device_get(state)
    ours, right = found["mosaic"], found["reference"]
    tolerance = 1e-6 if bits == 32 else 1e-4
    difference = ours[0] - right[0]
    other_sign = np.abs(difference) > 1e-3
    assert other_sign.sum() <= (10 if name == "lion" and bits == 32 else 0)
    of_same = np.linalg.norm(difference[~other_sign])
    assert of_same <= tolerance * np.linalg.norm(right[0])
    assert np.array_equal(ours[2], ours[0].astype(jnp.bfloat16))
    for moment in rule.moments:
        pair = [plain(moment, state[1][moment]) for state in (ours, right)]
        least = 0.02 if bits == 8 else 1e-6
        assert np.linalg.norm(pair[0] - pair[1]) <= least * np.linalg.norm(pair[1])


def plain(name: str, moment: jax.Array | Quantized) -> np.ndarray:
    quantized = isinstance(moment, Quantized)
    return np.asarray(dequantize(name, moment) if quantized else moment)


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "bits", "dtype", "copies"),
    list(
        itertools.product(
            RULES, (8, 32), ("f4", "bfloat16", "f2"), (None, "bfloat16", "f2")
        )
    ),
)
def test_kernel_lowers_for_cuda(name: str, bits: int, dtype: str, copies: Any) -> None:
    rule = RULES[name]
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")

    def shape(dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((ELEMENTS,), jnp.dtype(dtype))

    def step(params, grads, moments, copies):
        options = {"copies": copies, "leaves": LEAVES}
        return fused_update(rule, params, grads, moments, NUMBERS, **options)

    moments = jax.eval_shape(lambda: init_moments(rule, ELEMENTS, bits=bits))
    given = (
        shape("f4"),
        shape(dtype),
        moments,
        None if copies is None else shape(copies),
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(step).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == (2 if rule.trust_ratio else 1)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": jnp.ones(100)}, "params: 100 elements are not full tiles of 1024"),
        ({"params": jnp.ones(TILE, jnp.bfloat16)}, "bfloat16; it must be float32"),
        ({"grads": jnp.ones(2 * TILE)}, r"grads: has shape \(2048,\)"),
        ({"moments": {}}, r"AdamW has \['mu', 'nu'\]; make them with init_moments"),
        ({"copies": jnp.ones(1)}, r"copies: has shape \(1,\)"),
        (
            {"moments": {"mu": jnp.ones(TILE), "nu": jnp.ones(8)}},
            r"\['nu'\]: has shape",
        ),
        (
            {"moments": dict.fromkeys(("mu", "nu"), jnp.ones(TILE, jnp.bfloat16))},
            r"moments\['mu'\]: has dtype bfloat16; it must be float32",
        ),
        (
            {"moments": init_moments(AdamW(), TILE, bits=8) | {"nu": SIGNED_ROOTS}},
            r"moments\['nu'\].codes: has dtype int8; it must be uint8",
        ),
        ({"decays": np.zeros(2)}, r"decays: has shape \(2,\); .* needs \(1,\)"),
        ({"numbers": Numbers(0.1, count=0)}, "count=0: the first step is number 1"),
        ({"rule": RULES["lamb"]}, "leaves: trust ratios are per leaf"),
        (
            {"rule": RULES["lamb"], "leaves": LEAVES},
            r"leaves.of_tiles: has shape \(4,\); the bucket has 1 tiles",
        ),
        (
            {"rule": RULES["lamb"], "leaves": Leaves(np.array([1]), 1)},
            "leaves.of_tiles: must be numbers from 0 to num - 1 = 0",
        ),
        ({"implementation": "xla"}, "implementation='xla': must be 'mosaic' or 'refer"),
        ({"implementation": "mosaic"}, "fused optimizers can't run here"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    given = {"rule": AdamW(), "params": jnp.ones(TILE), "grads": jnp.ones(TILE)}
    given |= {"moments": init_moments(AdamW(), TILE), "numbers": NUMBERS, **change}
    with pytest.raises(ValueError, match=message):
        fused_update(**given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(b1=1.0), "b1=1.0 must be at least 0 and below 1"),
        (lambda: Lion(b2=-0.1), "b2=-0.1 must be at least 0"),
        (lambda: AdamW(eps=0.0), "eps=0.0 must be positive"),
        (lambda: init_moments(AdamW(), TILE, bits=4), "bits=4 must be 32"),
        (lambda: init_moments(AdamW(), 3), "num_elements: 3 elements are not full"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
