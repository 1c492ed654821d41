"""Are the parameters before a step stashed in the dtype of the computation?

Training is compared in tests/equivalence/test_asynchronous.py.
"""

import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.stashed import ParamsBefore
from jaxpar.step.carried import Stepped


def test_stash_is_of_the_parameters_before_the_step():
    part, yes = ParamsBefore(jnp.dtype("bfloat16")), jnp.bool_(True)
    before, after = {"w": jnp.full(3, 1.25)}, {"w": jnp.full(3, 2.0)}
    stash = part.after(part.init(before), Stepped(after, before, yes, yes, ~yes))
    assert stash["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(stash["w"].astype(np.float32), before["w"])
    assert not part.saved
