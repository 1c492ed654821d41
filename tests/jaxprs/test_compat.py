"""Are a scan's constants and carried values counted on this version of jax?"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.jaxprs.compat import scan_counts


@pytest.mark.parametrize("num_carry", [1, 3])
@pytest.mark.parametrize("num_consts", [0, 2])
def test_constants_and_carried_values_are_counted(num_consts, num_carry):
    def fn(consts, carry, xs):
        def body(carry, x):
            return [c + sum(consts) + x for c in carry], x

        return jax.lax.scan(body, carry, xs)

    given = [jnp.float32(1)] * num_consts, [jnp.float32(2)] * num_carry, jnp.ones(4)
    (eqn,) = [
        eqn
        for eqn in jax.make_jaxpr(fn)(*given).jaxpr.eqns
        if eqn.primitive.name == "scan"
    ]
    assert scan_counts(eqn.params) == (num_consts, num_carry)
