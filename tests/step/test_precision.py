"""Do precisions name the dtypes they say?"""

import jax.numpy as jnp
import pytest

from jaxpar.step.precision import Precision, make_precision

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("reduce", [None, *DTYPES])
def test_dtypes_are_those_named(name, reduce):
    assert make_precision(name, reduce) == Precision(
        compute_dtype=jnp.dtype(DTYPES[name]),
        reduce_dtype=jnp.dtype(DTYPES[reduce or name]),
        scales_loss=name == "fp16",
    )


def test_unknown_precision_names_the_near_one():
    message = (
        r"precision='fp61' must be one of 'fp32', 'bf16', 'fp16'\. Did you mean 'fp16'"
    )
    with pytest.raises(ValueError, match=message):
        make_precision("fp61")


def test_unknown_reduce_dtype_is_called_by_its_own_name():
    with pytest.raises(ValueError, match="reduce_dtype='half' must be one of 'fp32'"):
        make_precision("bf16", reduce_dtype="half")


@pytest.mark.parametrize("precision", [None, jnp.bfloat16])
def test_precision_that_is_no_name_raises(precision, unchecked_types):
    with pytest.raises(ValueError, match=r"precision=.* must be one of 'fp32'"):
        make_precision(precision)
