"""Are experts' numbers checked, and counted in closed form?"""

import jax
import pytest
from flax import nnx

from jaxpar.models.experts.config import ExpertsConfig, num_expert_params
from jaxpar.models.experts.layer import Experts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num": -1}, "num=-1 must be at least 0"),
        ({"num": 2, "top_k": 3}, "top_k=3 must be at most num=2"),
        ({"num": 2, "top_k": 0}, "top_k=0 must be at least 1"),
        ({"num": 4, "capacity_factor": 0.0}, "capacity_factor=0.0 must be above 0"),
        ({"num": 4, "group_rows": 0}, "group_rows=0 must be at least 1"),
        ({"num": 4, "every": 0}, "every=0 must be at least 1"),
        ({"num": 4, "balance_loss": -1.0}, "balance_loss=-1.0 must be at least 0"),
        ({"num": 4, "router_z_loss": -1.0}, "router_z_loss=-1.0 must be at least 0"),
        ({"num": 4, "shared_gate": True}, "shared_width=None; give the MLP's width"),
    ],
)
def test_numbers_out_of_range_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**fields)


def test_capacity_is_a_multiple_of_the_even_share() -> None:
    config = ExpertsConfig(num=8, top_k=2, capacity_factor=1.25)
    assert config.capacity(64) == 20
    assert config.capacity(1) == 1
    assert ExpertsConfig(num=2, capacity_factor=100.0).capacity(8) == 8
    with pytest.raises(ValueError, match="take any number"):
        ExpertsConfig(num=2).capacity(8)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_closed_form_counts_the_leaves(activation: str, bias: bool) -> None:
    config = ExpertsConfig(num=3, width=10, shared_width=7, shared_gate=True)
    how = {"activation": activation, "bias": bias, "output_stddev": 0.1}
    made = nnx.eval_shape(lambda: Experts(6, 99, config, **how, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(made, nnx.Param))
    gated = activation == "swiglu"
    count = num_expert_params(config, 6, 10, gated=gated, bias=bias)
    assert sum(x.size for x in leaves) == count
