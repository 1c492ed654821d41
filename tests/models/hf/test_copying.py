"""Are copies equal to NumPy's, for any dtypes and strides, and errors raised?"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.hf.copying import copy_into, empty, run_all

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "shape", [(130, 200), (64, 1), (1, 3), (0, 5), (7,), (2, 3, 4)]
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("source", "into"),
    [
        (jnp.bfloat16, np.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (np.float32, jnp.bfloat16),
        (np.float16, np.float32),
        (np.float32, np.float64),
    ],
)
def test_copy_is_a_cast_to_the_bit(shape, transposed, source, into):
    found = (RNG.normal(size=shape) * 1e3).astype(source)
    found = found.T if transposed else found
    out = np.zeros(found.shape, into)
    copy_into(out, found)
    np.testing.assert_array_equal(out, found.astype(into))


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (33, 7)])
def test_empty_arrays_are_aligned(shape):
    for dtype in (np.float32, jnp.bfloat16):
        found = empty(shape, np.dtype(dtype))
        assert (found.shape, found.dtype) == (shape, dtype)
        assert found.size == 0 or found.ctypes.data % 64 == 0
        assert found.flags.c_contiguous


def test_infinities_and_nans_are_kept():
    found = np.array([[np.inf, -np.inf, np.nan, -0.0]], jnp.bfloat16)
    out = np.empty((1, 4), np.float32)
    copy_into(out, found)
    np.testing.assert_array_equal(out, found.astype(np.float32))
    assert np.signbit(out[0, 3])


def test_parts_of_larger_arrays_are_read_and_written():
    found = RNG.normal(size=(300, 90)).astype(jnp.bfloat16)[10:200:3, 5:80]
    out = np.zeros((80, 90), np.float32)
    copy_into(out[2:77, 3:67], found.T)
    np.testing.assert_array_equal(out[2:77, 3:67], found.T.astype(np.float32))
    assert not out[:2].any()
    assert not out[:, 67:].any()


def test_copies_all_run_and_the_first_error_is_raised():
    done = []
    run_all(iter([lambda i=i: done.append(i) for i in range(20)]))
    assert sorted(done) == list(range(20))

    def fail() -> None:
        raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        run_all([fail, lambda: None])
