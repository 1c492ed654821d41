"""Where do the supported jax versions differ, and until which version?"""

from collections.abc import Mapping
from typing import Any


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Count the constants and the carried values of a scan equation.

    Args:
      params: the equation's parameters.

    Returns:
      (constants, carried values); the rest of its inputs are scanned over.
    """
    if "num_consts" in params:  # TODO(jax>=0.11): drop, from here to the return
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)
