"""Which leaves of the state are in host memory?"""

import dataclasses
import math
from collections.abc import Mapping

from jaxpar.step.update import UpdateSpec
from jaxpar.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class HostLeaf:
    """The state of one parameter that is in host memory.

    Attributes:
      param: its number among the parameters, in flattening order.
      moments: numbers of the optimizer's leaves that are of its shape.
      num_bytes: of all of these, on a device.
    """

    param: int
    moments: tuple[int, ...]
    num_bytes: int


def choose_host_leaves(
    spec: UpdateSpec, fraction: float, least: int
) -> dict[str, HostLeaf]:
    """Choose the parameters whose state is in host memory.

    Args:
      spec: what is known of the run.
      fraction: of the state's bytes, what is on the host at least, as far as leaves of
        at least `least` elements make it up. The largest leaves come first; where the
        last one would exceed it by more than it lacks now, a smaller one is tried.
      least: elements of a leaf on a device; smaller ones stay there.

    Returns:
      Parameter name -> its part.
    """
    found = _all_leaves(spec)
    whole = sum(leaf.num_bytes for leaf in found.values())
    sizes = {name: leaf.shape for name, leaf in named_leaves(spec.params).items()}
    ways = [leaf.ways_stored for leaf in spec.leaf_shardings]
    chosen: dict[str, HostLeaf] = {}
    lacking = fraction * whole
    for name in sorted(found, key=lambda name: -found[name].num_bytes):
        host = found[name]
        is_small = math.prod(sizes[name]) // ways[host.param] < least
        if is_small or host.num_bytes > 2 * lacking:
            continue
        chosen[name] = host
        lacking -= host.num_bytes
    return {name: host for name, host in found.items() if name in chosen}


def _all_leaves(spec: UpdateSpec) -> dict[str, HostLeaf]:
    """Every parameter, with the optimizer's leaves beside it."""
    params = named_leaves(spec.params)
    moments: Mapping[str, list[int]] = {name: [] for name in params}
    for number, (name, leaf) in enumerate(named_leaves(spec.opt_state).items()):
        parts = name.split("/")
        ends = ("/".join(parts[i:]) for i in range(len(parts)))
        param = next((end for end in ends if end in params), None)
        if param and params[param].shape == leaf.shape:
            moments[param].append(number)
    others = list(named_leaves(spec.opt_state).values())
    found = {}
    for number, (name, leaf) in enumerate(params.items()):
        itemsizes = [4, *(others[n].dtype.itemsize for n in moments[name])]
        elements = math.prod(leaf.shape) // spec.leaf_shardings[number].ways_stored
        found[name] = HostLeaf(number, tuple(moments[name]), elements * sum(itemsizes))
    return found
