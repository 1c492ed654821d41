"""Do the kernels, in Mosaic's CPU interpreter, do what plain JAX does, and no race?"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    Tile,
    TileWork,
    make_tile_work,
    reference,
)
from kernels_pallas.block_sparse_attention.operands import Limits
from kernels_pallas.block_sparse_attention.vjp import Implementation, attend
from tests.kernels_pallas.marks import needs_mosaic
from tests.kernels_pallas.races import watched

pytestmark = [pytest.mark.slow, needs_mosaic]

# Of the norm: rounding the weights to 11 bits and to 8, and the results.
TOLERANCE = {jnp.float16: 2e-3, jnp.bfloat16: 1.2e-2}


@pytest.fixture
def mosaic(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Implementation]:
    """The kernels, on the CPU, deterministic or not; each is refused that has races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: PLC0415

    from kernels_pallas.block_sparse_attention.mosaic import api  # noqa: PLC0415

    for module, name in (
        (api.forward_pass, "forward"),
        (api.backward_pass, "of_queries"),
        (api.backward_pass, "of_keys"),
        (api.backward_pass, "of_all"),
    ):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    params = plgpu.InterpretGPUParams(detect_races=True)

    def make(deterministic: bool) -> Implementation:
        options = api.Options(deterministic=deterministic, interpret=params)
        return Implementation(
            functools.partial(api.forward, options=options),
            functools.partial(api.backward, options=options),
        )

    return make


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention of two heads of queries; layouts have a row that sees nothing."""

    block: int
    length: int
    keys: int = 0
    """How many, where not as many as queries."""
    layout_heads: int = 1
    first_head: int | None = None
    causal: bool = True
    longest: int | None = None
    size: int = 64
    kv_heads: int = 2
    dtype: Any = jnp.float16
    has_segments: bool = False
    lens: tuple[int, ...] | None = None
    deterministic: bool = True

    def layout(self) -> BlockLayout:
        rng = np.random.default_rng(self.block)
        num_q, num_k = (
            -(-length // self.block) for length in (self.length, self.num_keys)
        )
        blocks = rng.random((self.layout_heads, num_q, num_k)) < 0.6
        blocks[:, 0, 0] = True
        blocks[:, num_q // 2] = False
        return BlockLayout(blocks, self.block)

    @property
    def num_keys(self) -> int:
        return self.keys or self.length

    def work(self) -> TileWork:
        options = {"causal": self.causal, "longest": self.longest}
        with warnings.catch_warnings(action="ignore"):  # of coarse tiles
            return make_tile_work(
                self.layout(),
                self.length,
                self.num_keys,
                tile=Tile(128, 128),
                **options,
            )


CASES = {
    "causal": Case(64, 250),
    "blocks of 16": Case(16, 256),
    "heads differ": Case(32, 256, layout_heads=2, causal=False, kv_heads=1),
    "split rows": Case(128, 384, causal=False, longest=1),
    "head 128": Case(128, 256, size=128, kv_heads=1, dtype=jnp.bfloat16),
    "limits": Case(64, 250, has_segments=True, lens=(210,)),
    "keys of their own": Case(64, 130, keys=250, causal=False, lens=(0, 200)),
    "some heads": Case(64, 256, layout_heads=4, first_head=2),
    "split groups": Case(
        64, 256, layout_heads=4, first_head=2, causal=False, longest=1, kv_heads=1
    ),
    "head 256": Case(64, 256, size=256, kv_heads=1, dtype=jnp.bfloat16),
    "head 256, limits": Case(
        16,
        250,
        layout_heads=4,
        first_head=2,
        longest=1,
        size=256,
        has_segments=True,
        lens=(210,),
    ),
    "one pass": Case(
        32,
        250,
        layout_heads=4,
        first_head=2,
        longest=1,
        size=128,
        kv_heads=1,
        deterministic=False,
    ),
    "one pass, limits": Case(
        64, 250, size=128, has_segments=True, lens=(0, 210), deterministic=False
    ),
    "one pass, head 64": Case(
        32,
        250,
        layout_heads=4,
        first_head=2,
        longest=1,
        kv_heads=1,
        has_segments=True,
        dtype=jnp.bfloat16,
        deterministic=False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_do_what_the_reference_does(
    name: str, mosaic: Callable[[bool], Implementation]
) -> None:
    case = CASES[name]
    work = case.work()
    assert (work.rows.num_parts > 0) == (case.longest is not None)
    rng = np.random.default_rng(0)
    batch = len(case.lens or (0,))

    def draw(tokens: int, heads: int) -> jax.Array:
        drawn = rng.standard_normal((batch, tokens, heads, case.size))
        return jnp.asarray(drawn, case.dtype)

    q, do = draw(case.length, 2), draw(case.length, 2)
    k, v = (draw(case.num_keys, case.kv_heads) for _ in range(2))
    sorted_ids = np.sort(rng.integers(0, 3, (batch, case.length)), axis=1)
    ids = jnp.asarray(sorted_ids, jnp.int32) if case.has_segments else None
    limits = Limits(
        ids,
        ids,
        None if case.lens is None else jnp.asarray(case.lens, jnp.int32),
        None if case.first_head is None else jnp.int32(case.first_head),
    )

    def run(implementation: Implementation, *given: jax.Array) -> tuple:
        def both(*given: jax.Array) -> Any:
            return attend(*given, limits, work, case.size**-0.5, implementation)

        (o, lse), pull = jax.vjp(both, *given)
        found = pull((do.astype(o.dtype), jnp.zeros_like(lse)))
        return (o, *found), lse

    found, lse = run(mosaic(case.deterministic), q, k, v)
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    plain = Implementation(reference.forward, reference.backward)
    wanted, wanted_lse = run(plain, *exact)
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(wanted_lse))
    seen = np.isfinite(wanted_lse)
    np.testing.assert_allclose(lse[seen], wanted_lse[seen], rtol=1e-4, atol=1e-3)
    for what, one, other in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        error = jnp.linalg.norm(one.astype(jnp.float32) - other)
        relative = float(error / jnp.linalg.norm(other))
        assert relative < TOLERANCE[case.dtype], (what, relative)
    nothing = ~np.asarray(seen).swapaxes(1, 2)
    assert nothing.any()
    assert not np.asarray(found[0])[nothing].any()
    assert not np.asarray(found[1])[nothing].any()
