"""How do the processes of a run agree on the content of a shared folder?

Every decision that depends on the disk is made by process 0 and sent to the others: two
processes that list a shared folder at slightly different moments could otherwise decide
differently, and one would wait for the other forever. Errors are sent the same way, so
all processes raise.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.checkpoint.manifest import DamagedError
from jaxpar.launch.lease import LeaseLostError

T = TypeVar("T")

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        DamagedError,
        FileNotFoundError,
        NotADirectoryError,
        PermissionError,
        OSError,
        RuntimeError,
        ValueError,
        LeaseLostError,
    )
}


def gather(value: Any) -> list[Any]:
    """Gather one JSON value of each process, in process order, on every process."""
    if jax.process_count() == 1:
        return [value]
    payload = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(payload.size)))
    # Padded to a power of two: few shapes, so few programs to compile.
    width = 1 << int(sizes.max() - 1).bit_length()
    padded = np.zeros(width, np.uint8)
    padded[: payload.size] = payload
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def from_first(compute: Callable[[], T]) -> T:
    """Compute a JSON value on process 0 and return it, or raise, on every process.

    Args:
        compute: Called on process 0 only. A ValueError, OSError or LeaseLostError
            that it raises is raised on every process, with the same text.

    Returns:
        The result of compute; on the other processes, as JSON returns it.
    """
    if jax.process_count() == 1:
        return compute()
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            answer = {"value": compute()}
        except (OSError, ValueError, LeaseLostError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
    answer = gather(answer)[0]
    if "error" in answer:
        raise _ERRORS.get(answer["error"], ValueError)(answer["text"])
    return answer["value"]


def on_all(compute: Callable[[], T]) -> T:
    """Compute a value on every process; where one raises, all do.

    Args:
        compute: Called on every process. May raise ValueError, OSError, RuntimeError.

    Returns:
        This process's result.
    """
    value, error = None, None
    try:
        value = compute()
    except (OSError, ValueError, RuntimeError) as raised:
        error = raised
    failed = gather(None if error is None else [type(error).__name__, str(error)])
    if error is not None:
        raise error
    for index, each in enumerate(failed):
        if each is not None:
            raise _ERRORS.get(each[0], ValueError)(f"process {index}: {each[1]}")
    return cast("T", value)
