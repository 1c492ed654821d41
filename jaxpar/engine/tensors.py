"""How is another framework's tensor converted to an array: by DLPack, without a copy.

No framework is imported: any object with the protocol that is neither NumPy's nor
JAX's is accepted, such as a PyTorch tensor.
"""

from typing import Any

import jax
import numpy as np

_HOST = (1, 3, 11)  # Host memory, and host memory pinned by CUDA and ROCm.
_DEVICES = {2: "CUDA", 8: "Metal", 10: "ROCm", 13: "CUDA", 14: "oneAPI"}


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is another framework's tensor."""
    is_own = isinstance(leaf, (jax.Array, np.ndarray))
    return hasattr(leaf, "__dlpack__") and not is_own


def as_array(leaf: Any, name: str, platform: str) -> np.ndarray | jax.Array:
    """Convert another framework's tensor.

    Args:
      leaf: an object for which `is_tensor` is true.
      name: argument and leaf name, for the error.
      platform: the mesh's platform, such as "cpu".

    Returns:
      A view of the tensor's memory: a NumPy array on the host, a JAX array on a GPU.

    Raises:
      ValueError: if it is on another platform than the mesh, or can't be exported.
    """
    what = f"{name} is a {type(leaf).__name__}"
    try:
        kind = int(leaf.__dlpack_device__()[0])
        if kind in _HOST or platform == "gpu":
            return _taken(leaf, is_on_host=kind in _HOST)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        dtype = getattr(leaf, "dtype", "its dtype")
        raise ValueError(
            f"{what} of {dtype} that DLPack can't convert ({error}). Pass one that is "
            "contiguous, detached and of a dtype that JAX supports, or a NumPy array."
        ) from error
    found = _DEVICES.get(kind, f"DLPack kind {kind}")
    raise ValueError(
        f"{what} on a {found} device, but the mesh's devices are {platform}; "
        "move it to host memory (tensor.cpu())."
    )


def _taken(leaf: Any, *, is_on_host: bool) -> np.ndarray | jax.Array:
    if is_on_host:
        try:
            return np.from_dlpack(leaf)
        except (BufferError, RuntimeError):  # Perhaps a dtype that only JAX has.
            return np.asarray(jax.dlpack.from_dlpack(leaf))
    array = jax.dlpack.from_dlpack(leaf)
    # With several processes these are one process's rows; a jax.Array means all rows.
    return array if jax.process_count() == 1 else np.asarray(array)
