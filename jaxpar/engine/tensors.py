"""How does another framework's tensor become an array? By DLPack, copying nothing.

No framework is imported: what speaks the protocol and is neither NumPy's nor JAX's is
taken, such as a tensor of PyTorch.
"""

from typing import Any

import jax
import numpy as np

_HOST = (1, 3, 11)  # Plain memory, and what CUDA and ROCm pin.
_DEVICES = {2: "CUDA", 8: "Metal", 10: "ROCm", 13: "CUDA", 14: "oneAPI"}


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is another framework's tensor."""
    is_own = isinstance(leaf, (jax.Array, np.ndarray))
    return hasattr(leaf, "__dlpack__") and not is_own


def as_array(leaf: Any, name: str, platform: str) -> np.ndarray | jax.Array:
    """Take another framework's tensor.

    Args:
      leaf: what `is_tensor`.
      name: which argument and leaf it is, for the error.
      platform: the mesh's, such as "cpu".

    Returns:
      A view of the tensor's memory: NumPy's on the host, JAX's on a GPU.

    Raises:
      ValueError: if it is on a device that the mesh is not of, or can't be exported.
    """
    what = f"{name} is a {type(leaf).__name__}"
    try:
        kind = int(leaf.__dlpack_device__()[0])
        if kind in _HOST or platform == "gpu":
            return _taken(leaf, is_on_host=kind in _HOST)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        dtype = getattr(leaf, "dtype", "its dtype")
        raise ValueError(
            f"{what} of {dtype} that can't be taken by DLPack ({error}). Pass one that "
            "is contiguous, detached and of a dtype that JAX has, or a NumPy array."
        ) from error
    found = _DEVICES.get(kind, f"DLPack's kind {kind}")
    raise ValueError(
        f"{what} on a device of {found}, but the mesh's devices are {platform}; "
        "pass it in the host's memory (tensor.cpu())."
    )


def _taken(leaf: Any, *, is_on_host: bool) -> np.ndarray | jax.Array:
    if is_on_host:
        try:
            return np.from_dlpack(leaf)
        except (BufferError, RuntimeError):  # It may be a dtype that JAX alone has.
            return np.asarray(jax.dlpack.from_dlpack(leaf))
    array = jax.dlpack.from_dlpack(leaf)
    # Of several processes each has its own rows, which a jax.Array is not taken as.
    return array if jax.process_count() == 1 else np.asarray(array)
