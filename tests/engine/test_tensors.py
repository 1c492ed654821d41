"""Is another framework's tensor taken by DLPack, without a copy, or refused by name?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.engine.batches import make_batch_spec
from jaxpar.engine.tensors import as_array, is_tensor
from jaxpar.mesh import MeshShape, make_mesh

ROWS = 16


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshShape(data=4, tensor=2))


def make_batch(rows=ROWS):
    return {
        "tokens": np.arange(rows * 3, dtype=np.int32).reshape(rows, 3),
        "mask": np.ones(rows, np.bool_),
    }


@pytest.fixture(scope="module")
def spec(mesh):
    return make_batch_spec(make_batch(), mesh, accumulate=2)


class Tensor:
    """Another framework's: DLPack, of an array's memory, and nothing else."""

    def __init__(self, array, kind=1):
        self._array, self._kind = array, kind

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._kind, 0


class Watched(Tensor):
    """A tensor of which a gradient is wanted, as PyTorch refuses it."""

    dtype = "torch.float32"

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient")


def tensors(batch):
    return jax.tree.map(Tensor, batch)


def test_tensor_of_another_framework_is_taken_without_a_copy():
    array = np.arange(6, dtype=np.int64)
    taken = as_array(Tensor(array), "batch: leaf x", "cpu")
    assert isinstance(taken, np.ndarray)
    assert np.shares_memory(taken, array)


@pytest.mark.parametrize("own", [np.ones(3), jnp.ones(3), np.float32(1), 1.0, [1]])
def test_arrays_of_numpy_and_jax_are_no_tensors_and_numbers_neither(own):
    assert not is_tensor(own)
    assert is_tensor(Tensor(np.ones(3)))


@pytest.mark.parametrize("kind", [1, 3, 11], ids=["host", "CUDA's", "ROCm's"])
def test_pinned_host_memory_is_host_memory(kind):
    taken = as_array(Tensor(np.arange(3), kind), "batch: leaf x", "cpu")
    np.testing.assert_array_equal(taken, [0, 1, 2])


def test_tensors_are_a_batch_and_its_sample(spec, mesh):
    assert make_batch_spec(tensors(make_batch()), mesh, 2) == spec
    placed = spec.put(tensors(make_batch()))
    assert jax.tree.all(jax.tree.map(np.array_equal, placed, make_batch()))
    some = spec.put_any(tensors(make_batch(4)), whole=False)[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, some, make_batch(4)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float16])
def test_tensor_of_a_dtype_that_numpy_lacks_is_taken(mesh, dtype):
    array = jnp.arange(8).astype(dtype)
    spec = make_batch_spec({"x": Tensor(array)}, mesh, 1)
    placed = spec.put({"x": Tensor(array)})["x"]
    assert placed.dtype == dtype
    assert np.array_equal(placed, array)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (Tensor(np.ones(8), kind=2), r"Tensor on a CUDA device, but the mesh's "
         r"devices are cpu; move it to host memory \(tensor\.cpu\(\)\)"),
        (Tensor(np.ones(8), kind=7), "Tensor on a DLPack kind 7 device, but"),
        (Watched(np.ones(8)), r"Watched of torch\.float32 that DLPack can't convert "
         r"\(Can't export tensors that require gradient\)\. Pass one that is"),
        (Tensor(np.ones(8, np.longdouble)), "Tensor of its dtype that DLPack can't "
         r"convert \(.*\)\. Pass one .* of a dtype that JAX supports, or a NumPy"),
    ],
)  # fmt: skip
def test_tensor_that_can_not_be_taken_is_named(mesh, leaf, message):
    message = f"batch: leaf x is a {message}"
    with pytest.raises(ValueError, match=f"^sample_{message}"):
        make_batch_spec({"x": leaf}, mesh, 1)
    spec = make_batch_spec({"x": np.ones(8)}, mesh, 1)
    with pytest.raises(ValueError, match=f"^{message}"):
        spec.put({"x": leaf})


def test_tensors_of_pytorch_are_a_batch(spec):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    batch = make_batch()
    placed = spec.put(jax.tree.map(torch.from_numpy, batch))
    assert jax.tree.all(jax.tree.map(np.array_equal, placed, batch))
