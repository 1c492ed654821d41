"""Which leaves of the state are in host memory?"""

import dataclasses
import math
from collections.abc import Collection, Mapping

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
    spec: UpdateSpec, fraction: float, least: int, but: Collection[str] = ()
) -> dict[str, HostLeaf]:
    """Choose the parameters whose state is in host memory.

    Args:
      spec: what is known of the run.
      fraction: of the state's bytes, what is on the host, as nearly as the largest
        leaves that fit into it make it up.
      least: elements of a leaf on a device; smaller ones stay there.
      but: names of leaves that stay on the device.

    Returns:
      Parameter name -> its part.
    """
    every = _all_leaves(spec)
    wanted = fraction * sum(leaf.num_bytes for leaf in every.values())
    shapes = [leaf.shape for leaf in named_leaves(spec.params).values()]
    ways = [leaf.ways_stored for leaf in spec.leaf_shardings]
    large = {
        name: host
        for name, host in every.items()
        if math.prod(shapes[host.param]) // ways[host.param] >= least
        and name not in but
    }
    # With the last one a little over, or with none.
    chosen = [_largest_first(large, wanted, over) for over in (1.0, 2.0)]
    return min(chosen, key=lambda found: abs(wanted - _bytes_of(found)))


def _largest_first(
    leaves: Mapping[str, HostLeaf], wanted: float, over: float
) -> dict[str, HostLeaf]:
    """Those that fit into so many bytes, or into what is lacking times `over`."""
    found: dict[str, HostLeaf] = {}
    for name in sorted(leaves, key=lambda name: -leaves[name].num_bytes):
        if leaves[name].num_bytes <= over * (wanted - _bytes_of(found)):
            found[name] = leaves[name]
    return {name: host for name, host in leaves.items() if name in found}


def _bytes_of(leaves: Mapping[str, HostLeaf]) -> int:
    return sum(leaf.num_bytes for leaf in leaves.values())


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
