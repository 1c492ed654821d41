"""What does an optimizer's update communicate, beyond the ZeRO stage's closed form?

The closed form has gathers of parameters and reductions of gradients. Elementwise rules
(Adam, schedule-free) need no more; Muon exchanges matrices, LAMB sums norms. Read from
a compiled step, where all that follows the gradients has a named scope.
"""

import re
from collections.abc import Iterable

from rich.filesize import decimal

from jaxpar.compiled.collectives import Collective
from jaxpar.step.train_step import UPDATE_SCOPE

_IN_UPDATE = re.compile(rf"[/(:]{UPDATE_SCOPE}/")


def is_in_update(op_name: str) -> bool:
    """Whether an operation is in the update's named scope.

    Args:
      op_name: jax's name of it. One that the compiler combined of several has their
        names, and is counted as a whole.

    Example:
      >>> is_in_update("jit(step)/update/dot_general")
      True
      >>> is_in_update("jit(step)/(update/reduce_sum:shard_map/psum)")
      True
      >>> is_in_update("jit(step)/shard_map/psum")
      False
    """
    return _IN_UPDATE.search(op_name) is not None


def sent_text(collectives: Iterable[Collective]) -> str:
    """What a device sends by kind and axes, most bytes first.

    Example:
      >>> sent_text([Collective("all-gather", ("data",), "f32", 4, 1, 8000, 8000)])
      '6.0 kB all-gather over data'
    """
    sent: dict[str, int] = {}
    for row in collectives:
        name = f"{row.kind} over {' x '.join(row.axes) or 'no axis'}"
        sent[name] = sent.get(name, 0) + row.sent_bytes
    most_first = sorted(sent.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{decimal(number)} {name}" for name, number in most_first if number
    )


def update_text(of_update: Iterable[Collective], zero: int) -> str:
    """What a device sends in the update, beyond the closed form.

    Args:
      of_update: the collectives of the update's scope.
      zero: the ZeRO stage.

    Returns:
      A line.
    """
    sent = sent_text(of_update) or "nothing"
    return (
        f"the optimizer's update sends, beyond the closed form of ZeRO {zero}: {sent}"
    )
