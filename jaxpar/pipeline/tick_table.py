"""How is a schedule run by a scan: as rows of indices, one row a tick.

Everything that a table implies is computed here, before tracing: which place in a
buffer holds what, when values arrive and where they are put.
"""

import dataclasses

import jax
import numpy as np

from jaxpar.pipeline.schedules.table import IDLE, Schedule, check_schedule, slots_of
from jaxpar.types import Leaf

_FOR_ALL = ("embed", "head", "head_place", "embed_backward")
_WEIGHTS = ("weight", "weight_chunk", "weight_place")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TickRows:
    """One row a tick: [ticks, P] by stage, or [ticks] for all; `IDLE` for none.

    In the scan each is one row, [P] or a scalar.

    Attributes:
      forward: the micro-batch of a stage's forward.
      forward_chunk: its chunk.
      forward_place: the place of its input (an embedding output is put there).
      forward_kept: where its residuals are put.
      backward: the micro-batch of a stage's backward.
      backward_chunk: its chunk.
      backward_place: the place of its input.
      backward_kept: the place of its forward's residuals.
      cotangent_place: the place of its cotangent.
      products_place: where the inputs of its deferred weight gradients are put.
      weight: [ticks, P, w]: the micro-batches of a stage's weight gradients.
      weight_chunk: [ticks, P, w]: their chunks.
      weight_place: [ticks, P, w]: the places of their inputs.
      input_arrives: where an input received at the end of the tick is put.
      cotangent_arrives: where a cotangent received then is put.
      embed: [ticks]: the micro-batch that is embedded.
      head: [ticks]: the micro-batch whose loss is computed.
      head_place: [ticks]: where the last stage puts the loss's cotangent.
      embed_backward: [ticks]: the micro-batch whose embedding's gradient is computed.
    """

    forward: Leaf
    forward_chunk: Leaf
    forward_place: Leaf
    forward_kept: Leaf
    backward: Leaf
    backward_chunk: Leaf
    backward_place: Leaf
    backward_kept: Leaf
    cotangent_place: Leaf
    products_place: Leaf
    weight: Leaf
    weight_chunk: Leaf
    weight_place: Leaf
    input_arrives: Leaf
    cotangent_arrives: Leaf
    embed: Leaf
    head: Leaf
    head_place: Leaf
    embed_backward: Leaf


@dataclasses.dataclass(frozen=True)
class TickTable:
    """A schedule, ready to run.

    Attributes:
      rows: the rows.
      num_inputs: places in the buffer of inputs.
      num_kept: places in the buffer of residuals.
      num_cotangents: places in the buffer of cotangents.
      num_products: places in the buffer of deferred weight gradients' inputs.
    """

    rows: TickRows
    num_inputs: int
    num_kept: int
    num_cotangents: int
    num_products: int


def make_tick_table(
    schedule: Schedule, *, training: bool, keeps: bool = False
) -> TickTable:
    """Compute a schedule's rows.

    Args:
      schedule: a valid schedule.
      training: False for forwards only, in the ticks that have one.
      keeps: whether forwards save residuals, so that backwards need no input.

    Returns:
      Its rows, and the sizes of its buffers.
    """
    times = check_schedule(schedule)
    P = schedule.num_stages
    last_use = times.backward if training and not keeps else times.forward
    inputs = slots_of(times.input_there, last_use, P)
    kept = slots_of(times.forward, times.backward, P)
    cotangents = slots_of(times.cotangent_there, times.backward, P)
    products = slots_of(times.backward, times.weight, P)
    num_ticks = schedule.num_ticks if training else int(times.forward.max()) + 1
    by_stage = {
        field.name: np.full((num_ticks, P), IDLE)
        for field in dataclasses.fields(TickRows)
        if field.name not in (*_FOR_ALL, *_WEIGHTS)
    }
    num_slots = schedule.weight.shape[2]
    weights = {name: np.full((num_ticks, P, num_slots), IDLE) for name in _WEIGHTS}
    for_all = {name: np.full(num_ticks, IDLE) for name in _FOR_ALL}
    final = times.forward.shape[1] - 1
    for m, g in np.ndindex(times.forward.shape):
        chunk, stage = divmod(g, P)
        tick = times.forward[m, g]
        by_stage["forward"][tick, stage] = m
        by_stage["forward_chunk"][tick, stage] = chunk
        by_stage["forward_place"][tick, stage] = inputs[m, g]
        by_stage["forward_kept"][tick, stage] = kept[m, g]
        if g < final:
            by_stage["input_arrives"][tick, (g + 1) % P] = inputs[m, g + 1]
        else:
            for_all["head"][tick] = m
            for_all["head_place"][tick] = cotangents[m, g]
        if g == 0:
            for_all["embed"][tick] = m
        if not training:
            continue
        tick = times.backward[m, g]
        by_stage["backward"][tick, stage] = m
        by_stage["backward_chunk"][tick, stage] = chunk
        by_stage["backward_place"][tick, stage] = inputs[m, g]
        by_stage["backward_kept"][tick, stage] = kept[m, g]
        by_stage["cotangent_place"][tick, stage] = cotangents[m, g]
        by_stage["products_place"][tick, stage] = products[m, g]
        if g > 0:
            by_stage["cotangent_arrives"][tick, (g - 1) % P] = cotangents[m, g - 1]
        else:
            for_all["embed_backward"][tick] = m
    if training:
        _fill_weights(weights, schedule, products)
    tables = by_stage | weights | for_all
    rows = {name: table.astype(np.int32) for name, table in tables.items()}
    buffers = (inputs, kept, cotangents, products)
    return TickTable(TickRows(**rows), *(int(buffer.max()) + 1 for buffer in buffers))


def _fill_weights(
    weights: dict[str, np.ndarray], schedule: Schedule, products: np.ndarray
) -> None:
    for tick, stage, slot in np.argwhere(schedule.weight[..., 0] != IDLE):
        m, chunk = schedule.weight[tick, stage, slot]
        weights["weight"][tick, stage, slot] = m
        weights["weight_chunk"][tick, stage, slot] = chunk
        place = products[m, chunk * schedule.num_stages + stage]
        weights["weight_place"][tick, stage, slot] = place
