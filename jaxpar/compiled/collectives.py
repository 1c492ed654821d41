"""What does a compiled program communicate, over which mesh axis: its collectives.

Bytes are those of the unsharded array that a device's group assembles or sums: the
output of an all-gather, the input of a reduce-scatter or an all-reduce. Closed forms
count the same bytes, and the dtype on the wire decides them.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from jaxpar.compiled.hlo import ArrayType, Instruction, Module, runs_of

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)
_SENT = {
    # Bytes that one device sends, per byte of the unsharded array, in a group of n: the
    # best known algorithms (rings; Thakur, Rabenseifner, Gropp 2005).
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind, over one set of axes, in one dtype.

    Attributes:
      kind: such as "all-gather", synchronous or asynchronous.
      axes: the mesh axes that its groups span; empty if they span none.
      dtype: of the communicated arrays.
      group_size: devices in a group.
      count: how often it runs per step.
      bytes: of the unsharded arrays, on one device, over all those runs.
      largest: bytes of the largest single collective.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    group_size: int
    count: int
    bytes: int
    largest: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends per step."""
        return _sent(self.kind, self.bytes, self.group_size)


@dataclasses.dataclass(frozen=True)
class Site:
    """One collective instruction.

    Attributes:
      instruction: the instruction.
      kind: as of `Collective`.
      axes: likewise.
      group_size: likewise.
      times: how often it runs per step.
      payload: dtype -> bytes of the unsharded arrays, on one device, in one run.
    """

    instruction: Instruction
    kind: str
    axes: tuple[str, ...]
    group_size: int
    times: int
    payload: Mapping[str, int]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends in one run."""
        return _sent(self.kind, sum(self.payload.values()), self.group_size)

    def bytes_over(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the unsharded arrays, in one run; see `payload`.

        Of a collective along a part of an axis, such as one dim of a torus: the bytes
        of one over the whole axis that sends as much.

        Args:
          sizes: mesh axis -> devices on it.
        """
        number = sum(self.payload.values())
        whole = math.prod(sizes[axis] for axis in self.axes)
        if self.kind not in _SENT or not 1 < self.group_size < whole:
            return number
        share = _SENT[self.kind]
        return round(number * share(self.group_size) / share(whole))


def _sent(kind: str, number: int, group_size: int) -> int:
    """Bytes that one device sends of so many bytes of unsharded arrays."""
    share = _SENT.get(kind, lambda _: 1.0)
    return round(number * share(group_size))


def join_collectives(
    programs: Iterable[Iterable[Collective]],
) -> tuple[Collective, ...]:
    """Sum the collectives of programs that run one after the other."""
    found: dict[tuple, Collective] = {}
    for row in (row for rows in programs for row in rows):
        key = row.kind, row.axes, row.dtype, row.group_size
        other = found.get(key, Collective(*key, 0, 0, 0))
        found[key] = Collective(
            *key,
            other.count + row.count,
            other.bytes + row.bytes,
            max(other.largest, row.largest),
        )
    return tuple(sorted(found.values(), key=lambda row: -row.bytes))


def find_sites(
    module: Module, sizes: Mapping[str, int]
) -> tuple[list[Site], tuple[str, ...]]:
    """Find every collective instruction of a program that runs.

    Args:
      module: the program.
      sizes: mesh axis -> devices on it, in the mesh's order.

    Returns:
      (the instructions; names of the loops whose trip count is not known, and whose
      contents are counted once).
    """
    runs, unknown = runs_of(module)
    continued = _continued(module)
    sites = []
    for name, times in runs.items():
        if name in continued or not times:
            continue
        table = module.computations[name].instructions
        for instruction in table.values():
            kind = _kind(instruction, name)
            if kind is None:
                continue
            axes, group_size = _group(instruction, sizes)
            moved = _operands(instruction, table)
            scale = group_size if kind == "all-gather" else 1
            payload = {
                dtype: sum(a.bytes for a in moved if a.dtype == dtype) * scale
                for dtype in sorted({array.dtype for array in moved})
            }
            sites.append(Site(instruction, kind, axes, group_size, times, payload))
    return sites, unknown


def sum_sites(sites: Iterable[Site]) -> tuple[Collective, ...]:
    """Sum instructions by kind, axes, dtype and group size.

    Args:
      sites: such as all those of a program.

    Returns:
      Collectives, most bytes first.
    """
    found: dict[tuple, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for site in sites:
        for dtype, payload in site.payload.items():
            entry = found[site.kind, site.axes, dtype, site.group_size]
            entry[0] += site.times
            entry[1] += site.times * payload
            entry[2] = max(entry[2], payload)
    rows = [Collective(*key, *value) for key, value in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _continued(module: Module) -> set[str]:
    """Computations that continue a collective which is counted where it starts.

    A TPU program writes an asynchronous collective into the fusion that starts it,
    every fusion that it runs beside, and the one that ends it.
    """
    names = {name for name in module.computations if "async_collective_fusion" in name}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.name.startswith("async-collective-done"):
                names.update(instruction.called)
    return names


def _kind(instruction: Instruction, computation: str) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    # A TPU program hides a reduce-scatter in a fusion of an all-reduce and a slice.
    if kind == "all-reduce" and "all-reduce-scatter" in computation:
        return "reduce-scatter"
    return kind


def _operands(
    instruction: Instruction, table: Mapping[str, Instruction]
) -> list[ArrayType]:
    """The inputs: the result of a -start lists both operands and results."""
    moved = [array for name in instruction.operands for array in table[name].types]
    return [array for array in moved if array.dtype not in ("token", "opaque")]


def _group(
    instruction: Instruction, sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
    """The axes that an instruction's groups span, and the devices in a group."""
    pairs = instruction.attribute("source_target_pairs")
    if pairs:
        links = _numbers(pairs).reshape(-1, 2)
        moving = [row for row in links if row[0] != row[1]]
        return _spanned(moving, sizes), 2
    groups = instruction.attribute("replica_groups")
    if groups.startswith("mesh["):
        ids = _mesh_groups(groups)
    else:
        ids = _device_groups(groups, math.prod(sizes.values()))
    return _spanned(ids, sizes), len(ids[0])


def _mesh_groups(groups: str) -> np.ndarray:
    """[groups, devices], from ``mesh['data'=4,'tensor'=2] {'data'}``.

    The names may be XLA's own (jax 0.10.2). A part of an axis is ``'data':(2)4``: the
    axis is split in three, the first of 2, and this is the second, of 4.
    """
    mesh, _, used = groups.partition("]")
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)]
    parts = {
        name: (int(before or 1), int(size or 0))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used)
    }
    dims, together = [], []
    for name, whole in axes:
        before, size = parts.get(name, (1, 1))
        size = size or whole
        together.append(len(dims) + 1)
        dims += [before, size, whole // (before * size)]
    ids = np.arange(math.prod(dims)).reshape(dims)
    ids = np.moveaxis(ids, together, range(-len(together), 0))
    return ids.reshape(-1, math.prod(dims[dim] for dim in together))


def _device_groups(groups: str, num_devices: int) -> np.ndarray:
    """[groups, devices], from ``{{0,1},{2,3}}`` or ``[2,2]<=[2,2]T(1,0)``."""
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups)
    if iota:
        shape, dims = ([int(n) for n in iota.group(i).split(",")] for i in (1, 2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota.group(3):
            ids = ids.transpose([int(n) for n in iota.group(3).split(",")])
        return ids.reshape(shape)
    rows = re.findall(r"\{([\d,]+)\}", groups)
    if not rows:
        return np.arange(num_devices)[None]
    return np.array([_numbers(row) for row in rows])


def _numbers(text: str) -> np.ndarray:
    return np.array([int(n) for n in re.findall(r"\d+", text)])


def _spanned(groups: Iterable[np.ndarray], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of some group differ."""
    shape = tuple(sizes.values())
    spanned = set()
    for group in groups:
        coordinates = np.unravel_index(group, shape)
        for axis, along in zip(sizes, coordinates, strict=True):
            if len(set(along.tolist())) > 1:
                spanned.add(axis)
    return tuple(axis for axis in sizes if axis in spanned)
