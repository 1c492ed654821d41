"""What do the kernels share: their build parameters, and their building blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any

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
    size: int
    dtype: Any
    scale: float
    stages: int
    interpret: Any

    @property
    def interprets(self) -> bool:
        """Whether the CPU's interpreter runs the kernel: it lacks some GPU features."""
        return self.interpret is not None

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
            grid=(lists.num_items, self.heads, self.batch),
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
      number: of the item.
      head: of the queries.
      kv_head: of the keys.
      row: of the batch.
      wg: this warpgroup.
      of_lists: the head's index in the lists.
    """

    refs: dict[str, Any]
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
            lax.axis_index("item"),
            head,
            lax.div(head, jnp.int32(build.group)),
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

    def other(self, step: Any) -> Any:
        """A tile's index on the other side."""
        return self.refs["tiles"][self.of_lists, self._read(START) + step, COLUMN]

    def mask(self, step: Any) -> Any:
        """The tile work's mask of a tile."""
        return self.refs["tiles"][self.of_lists, self._read(START) + step, MASK]


def accumulator(rows: int, columns: int) -> Any:
    """Registers that accumulate a matmul in fp32."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def tiled_smem(*shape: int, dtype: Any) -> Any:
    """Shared memory in the layout that TMA writes and wgmma reads."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    transforms = (tiling((8, 64)), swizzle(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def splat(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """An array of one fp32 number, in the register layout of a matmul's result."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


class Ring:
    """Buffers in shared memory that one warpgroup fills and the others use in turn.

    Args:
      names: the fetched operands; each has memory and a barrier under its name, and
        another with "_used" at which the others arrive.
      memory: by name.
      barriers: by name.
      stages: number of buffers.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        memory: dict[str, Any],
        barriers: dict[str, Any],
        stages: int,
    ):
        self.names, self._memory, self._barriers = names, memory, barriers
        self._stages = stages

    @staticmethod
    def barriers(names: tuple[str, ...], stages: int) -> dict[str, Any]:
        """Make its barriers."""
        used = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
        loaded = plgpu.Barrier(num_barriers=stages)
        return {
            **dict.fromkeys(names, loaded),
            **{f"{name}_used": used for name in names},
        }

    def fetch(self, count: Any, sources: Callable[[Any], dict[str, Any]]) -> None:
        """Fill buffers as they become free.

        Args:
          count: steps.
          sources: step -> the arrays to copy from, by name.
        """

        @pl.loop(0, count)
        def _(step: Any) -> None:
            slot = self.slot(step)
            for name, source in sources(step).items():
                self._wait_until_free(name, step)
                loaded = self._barriers[name].at[slot]
                plgpu.copy_gmem_to_smem(source, self._memory[name].at[slot], loaded)

        # Every arrival is waited for, as the interpreter requires.
        @pl.loop(lax.max(count - self._stages, jnp.int32(0)), count)
        def _(step: Any) -> None:
            for name in self.names:
                plgpu.barrier_wait(self._barriers[f"{name}_used"].at[self.slot(step)])

    def _wait_until_free(self, name: str, step: Any) -> None:
        @pl.when(step >= self._stages)
        def _() -> None:
            plgpu.barrier_wait(self._barriers[f"{name}_used"].at[self.slot(step)])

    def slot(self, step: Any) -> Any:
        """The buffer of a step."""
        return lax.rem(step, jnp.int32(self._stages))

    def wait(self, name: str, step: Any) -> Any:
        """Wait until a step's data has arrived."""
        plgpu.barrier_wait(self._barriers[name].at[self.slot(step)])

    def at(self, name: str, step: Any) -> Any:
        """A step's shared memory."""
        return self._memory[name].at[self.slot(step)]

    def free(self, name: str, step: Any) -> None:
        """Release a step's buffer from this warpgroup."""
        plgpu.barrier_arrive(self._barriers[f"{name}_used"].at[self.slot(step)])
