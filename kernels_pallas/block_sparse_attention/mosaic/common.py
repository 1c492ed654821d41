"""What do the kernels share: their build parameters, and their building blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.block_sparse_attention.mosaic.device_lists import (
    COLUMN,
    COUNT,
    FULL,
    MASK,
    PART,
    ROW,
    START,
    DeviceLists,
)
from kernels_pallas.block_sparse_attention.tile_work import TileWork
from kernels_pallas.operations import counted

WARPGROUPS = 2
"""Warpgroups that compute; another one fetches for them."""

ROWS = 64
"""Rows of a warpgroup's matmuls."""

LAYOUT = plgpu.Layout.WGMMA
OF_ROWS, OF_COLUMNS = LAYOUT.reduce(1), LAYOUT.reduce(0)


@dataclasses.dataclass(frozen=True)
class Build:
    """The static parameters of a kernel.

    Attributes:
      work: the work of the kernels.
      lists: of the tile work's rows, or of its columns.
      batch: rows of the batch.
      heads: of the queries.
      group: query heads that share a key head.
      by_keys: whether a program is of a key head and all queries that share it.
      size: of a head.
      dtype: of queries, keys and values.
      scale: of the scores, to base 2.
      stages: buffers in shared memory for each fetched operand.
      interpret: how to run without a GPU; None for a GPU.
    """

    work: TileWork
    lists: DeviceLists
    batch: int
    heads: int
    group: int
    by_keys: bool
    size: int
    dtype: Any
    scale: float
    stages: int
    interpret: Any

    @property
    def interprets(self) -> bool:
        """Whether the CPU's interpreter runs the kernel: it lacks some GPU features."""
        return self.interpret is not None

    @property
    def is_large(self) -> bool:
        """Whether the sums of 64 rows, [64, size], take half of the registers."""
        return self.size > 128

    @property
    def grid_heads(self) -> int:
        """Heads of the grid and of the lists."""
        return self.heads // self.group if self.by_keys else self.heads

    def call(
        self,
        name: str,
        products: int,
        given: dict[str, jax.Array],
        outs: dict[str, jax.ShapeDtypeStruct],
        memory: dict[str, Any],
        barriers: dict[str, Any],
        program: Callable[..., None],
    ) -> list[jax.Array]:
        """Run a program for every item, head and row of the batch, items outermost.

        Args:
          name: of the kernel, in profiles.
          products: matmuls per tile.
          given: the operands.
          outs: the results.
          memory: shared memory of a program.
          barriers: of a program.
          program: called with the references to all of these, by name.

        Returns:
          The results.
        """
        lists = self.lists
        listed = {"items": lists.items, "tiles": lists.tiles, "words": lists.words}
        names = [*given, *listed, *outs]

        def entry(*refs: Any) -> None:
            by_name = dict(zip(names, refs, strict=True))
            pl.run_scoped(
                lambda memory, barriers: program(by_name, memory, barriers),
                memory,
                barriers,
                collective_axes="wg",
            )

        kernel = plgpu.kernel(
            entry,
            out_type=list(outs.values()),
            grid=(lists.num_items, self.grid_heads, self.batch),
            grid_names=("item", "head", "row"),
            num_threads=WARPGROUPS + 1,
            thread_name="wg",
            kernel_name=f"block_sparse_attention_{name}",
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
            interpret=self.interpret if self.interprets else False,
        )
        call = counted(kernel, products * self._operations)
        return call(*given.values(), *listed.values())

    @property
    def _operations(self) -> int:
        """FLOPs of one matmul over all active tiles."""
        work = self.work
        tiles = round(work.active_tiles * work.tiles_q * work.tiles_k * self.heads)
        return 2 * self.batch * tiles * work.tile.q * work.tile.k * self.size


@dataclasses.dataclass(frozen=True)
class Item:
    """The work item of a program.

    Its numbers are read where they are used: held over a loop, each would occupy one of
    the registers that the sums need.

    Attributes:
      refs: the lists.
      build: the kernel's parameters.
      number: of the item.
      head: of the grid: of the queries, or with `by_keys` of the keys.
      kv_head: of the keys.
      row: of the batch.
      wg: this warpgroup.
      of_lists: the head's index in the lists.
    """

    refs: dict[str, Any]
    build: Build
    number: Any
    head: Any
    kv_head: Any
    row: Any
    wg: Any
    of_lists: Any

    @classmethod
    def read(cls, refs: dict[str, Any], build: Build) -> "Item":
        """Read the item of this program."""
        head = lax.axis_index("head")
        return cls(
            refs,
            build,
            lax.axis_index("item"),
            head,
            head if build.by_keys else lax.div(head, jnp.int32(build.group)),
            lax.axis_index("row"),
            lax.axis_index("wg"),
            jnp.int32(0) if build.lists.is_shared else head,
        )

    def _read(self, field: int) -> Any:
        return self.refs["items"][self.of_lists, self.number, field]

    @property
    def tile(self) -> Any:
        """Its row, or column, of tiles; -1 for padding."""
        return self._read(ROW)

    @property
    def count(self) -> Any:
        """The number of its tiles."""
        return self._read(COUNT)

    @property
    def full(self) -> Any:
        """How many of them, the first ones, need no mask."""
        return self._read(FULL)

    @property
    def length(self) -> Any:
        """Valid keys of the sequence."""
        if "lens" in self.refs:
            return self.refs["lens"][self.row]
        return jnp.int32(self.build.work.seq_k)

    @property
    def has_limits(self) -> bool:
        """Whether every tile needs a mask."""
        return "lens" in self.refs or "segments_q" in self.refs

    @property
    def part(self) -> Any:
        """The partial result that it computes; -1 if it computes a full one."""
        return self._read(PART)

    @property
    def place(self) -> Any:
        """Its row or column; 0 for padding, whose result is not stored."""
        return lax.max(self.tile, jnp.int32(0))

    @property
    def is_whole(self) -> Any:
        """Whether it computes the result of a row that is not split."""
        return (self.tile >= 0) & (self.part < 0)

    def other(self, step: Any) -> tuple[Any, Any, Any]:
        """A tile's index on the other side, the head of its queries, and its mask."""
        place = self.of_lists, self._read(START) + step
        column, mask = (self.refs["tiles"][*place, field] for field in (COLUMN, MASK))
        if not self.build.by_keys or self.build.group == 1:
            return column, self.head, mask
        tiles, group = self.build.work.tiles_q, self.build.group
        head = self.head * group + lax.div(column, jnp.int32(tiles))
        return lax.rem(column, jnp.int32(tiles)), head, mask


def accumulator(rows: int, columns: int) -> Any:
    """Registers that accumulate a matmul in fp32."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def tiled_smem(*shape: int, dtype: Any, width: int = 128) -> Any:
    """Shared memory in the layout that TMA writes and wgmma reads.

    Args:
      shape: of the array.
      dtype: its dtype.
      width: bytes of a row of its tiles; columns can only be cut between tiles.
    """
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    transforms = (tiling((8, width // jnp.dtype(dtype).itemsize)), swizzle(width))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def splat(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """An array of one fp32 number, in the register layout of a matmul's result."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


LISTED = "listed"
"""The name of what is `Listed` of a step."""


class Listed(NamedTuple):
    """What masks need to know of a step; the fetching warpgroup reads the lists.

    Attributes:
      first: the first token on the other side.
      in_tile: the same, in its tile.
      head: of the queries.
      mask: the tile work's mask of the tile.
      length: valid keys of the sequence.
    """

    first: Any
    in_tile: Any
    head: Any
    mask: Any
    length: Any


class Ring:
    """Buffers in shared memory that one warpgroup fills and the others use in turn.

    Args:
      names: the fetched operands; each has memory and a barrier under its name, and
        another with "_used" at which the others arrive.
      with_listed: the one whose barriers are also those of `LISTED`.
      memory: by name.
      barriers: by name.
      stages: number of buffers.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        with_listed: str,
        memory: dict[str, Any],
        barriers: dict[str, Any],
        stages: int,
    ):
        self.names, self._with_listed = names, with_listed
        self._memory, self._barriers = memory, barriers
        self._stages = stages

    @staticmethod
    def listed_memory(stages: int) -> dict[str, Any]:
        """Make the memory of `LISTED`."""
        shape = (stages, len(Listed._fields))
        return {LISTED: plgpu.SMEM(shape, jnp.int32)}

    @staticmethod
    def barriers(
        names: tuple[str, ...], with_listed: str, stages: int
    ) -> dict[str, Any]:
        """Make its barriers."""
        used = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
        loaded = plgpu.Barrier(num_barriers=stages)
        return {
            **dict.fromkeys(names, loaded),
            with_listed: plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            **{f"{name}_used": used for name in names},
        }

    def fetch(self, count: Any, sources: Callable[[Any], dict[str, Any]]) -> None:
        """Fill buffers as they become free.

        Args:
          count: steps.
          sources: step -> the arrays to copy from, by name, and the `Listed` numbers.
        """

        def fill(step: Any, slot: Any) -> Any:
            found = sources(step)
            for name in self.names:
                pl.when(step >= self._stages)(self._wait_until_free(name, slot))
                loaded = self._barriers[name].at[slot]
                plgpu.copy_gmem_to_smem(found[name], self.at(name, slot), loaded)
                if name == self._with_listed:
                    for field, number in enumerate(found[LISTED]):
                        self._memory[LISTED][slot, field] = number
                    plgpu.barrier_arrive(loaded)
            return self.next(slot)

        def drain(_: Any, slot: Any) -> Any:
            for name in self.names:
                self._wait_until_free(name, slot)()
            return self.next(slot)

        end = lax.fori_loop(0, count, fill, jnp.int32(0))
        # Every arrival is waited for, as the interpreter requires.
        is_round = count >= self._stages
        left = jnp.where(is_round, self._stages, count)
        lax.fori_loop(0, left, drain, jnp.where(is_round, end, 0))

    def _wait_until_free(self, name: str, slot: Any) -> Callable[[], None]:
        return lambda: plgpu.barrier_wait(self._barriers[f"{name}_used"].at[slot])

    def next(self, slot: Any) -> Any:
        """The buffer after another."""
        return jnp.where(slot == self._stages - 1, 0, slot + 1)

    def wait(self, name: str, slot: Any) -> Any:
        """Wait until data has arrived in a buffer."""
        plgpu.barrier_wait(self._barriers[name].at[slot])

    def at(self, name: str, slot: Any) -> Any:
        """A buffer's memory."""
        return self._memory[name].at[slot]

    def listed(self, slot: Any) -> Listed:
        """Read what is listed of a step, once its data has arrived."""
        numbers = self.at(LISTED, slot)
        return Listed(*(numbers[field] for field in range(len(Listed._fields))))

    def free(self, name: str, slot: Any) -> None:
        """Release a buffer from this warpgroup."""
        plgpu.barrier_arrive(self._barriers[f"{name}_used"].at[slot])
