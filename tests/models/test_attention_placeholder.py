"""Does the call that stands for cuDNN's attention have its shapes, bytes and work?"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.jaxprs.evaluate import PLACEHOLDER, flops
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models.attention_placeholder import attention_placeholder

B, T, N, K, H = 4, 256, 8, 4, 64
ONE_PRODUCT = 2 * B * N * T * T * H // 2


def shapes(dtype=jnp.bfloat16):
    query = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    key = jax.ShapeDtypeStruct((B, T, K, H), dtype)
    return query, key, key


def total(*args):
    return attention_placeholder(*args).astype(jnp.float32).sum()


def test_result_and_gradients_have_the_shapes_of_what_they_are_of():
    out = jax.eval_shape(attention_placeholder, *shapes())
    assert (out.shape, out.dtype) == ((B, T, N, H), jnp.bfloat16)
    grads = jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), *shapes())
    assert [(g.shape, g.dtype) for g in grads] == [(s.shape, s.dtype) for s in shapes()]


def test_work_is_two_products_forward_and_five_backward_of_half_the_scores():
    forward = jax.make_jaxpr(attention_placeholder)(*shapes())
    assert flops(forward.jaxpr.eqns) == 2 * ONE_PRODUCT
    both = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(*shapes())
    assert flops(both.jaxpr.eqns) == 7 * ONE_PRODUCT


@pytest.mark.parametrize(
    "mesh",
    [MeshShape(data=2, tensor=4), MeshShape(data=1, tensor=8), MeshShape(data=8)],
)
@pytest.mark.parametrize("manual", [(), ("data",), ("data", "pipe")])
def test_heads_and_rows_are_split_where_they_can_be(mesh, manual):
    """Over tensor where the key heads divide; rows only where data is automatic."""
    devices = make_mesh(mesh, jax.devices()[:8])

    def fn(*args):
        if not manual:
            return attention_placeholder(*args)
        spec = P("data") if B % mesh.data == 0 else P()
        return jax.shard_map(
            attention_placeholder,
            in_specs=(spec,) * 3,
            out_specs=spec,
            axis_names=set(manual),
            check_vma=False,
        )(*args)

    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
        lowered = jax.jit(fn).trace(*shapes()).lower()
        counted = flops(jax.make_jaxpr(fn)(*shapes()).jaxpr.eqns)
    text = lowered.as_text()
    heads = N // mesh.tensor if K % mesh.tensor == 0 else N
    rows = B // mesh.data if B % mesh.data == 0 else B
    assert f"{PLACEHOLDER}.attention.forward" in text
    assert f"tensor<{rows}x{T}x{heads}x{H}xbf16>" in text
    copies = 1 if B % mesh.data == 0 or not manual else mesh.data
    assert counted == 2 * ONE_PRODUCT * copies
