"""Which of a model's mutable state couples examples: what depends on them, and how?

Batch statistics depend on the rows, so a data shard that sees only its own computes
others than one device. A count of calls or a spectral norm's vectors depend on the
parameters and on themselves alone: every shard and every stage computes the same, one
micro-batch after another. State that depends on random numbers counts as coupled, for a
shard may draw its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from jax.extend import core

from jaxpar.jaxprs.dependence import of_outputs, tainted_outputs

ROWS, NUMBER, DRAWS = "the rows of the batch", "the number of rows", "random numbers"


def coupled_state(
    jaxpr: core.Jaxpr,
    names: Sequence[str],
    is_row: Sequence[bool],
    twice: Callable[[], core.Jaxpr | None],
) -> dict[str, str]:
    """Find the state that depends on examples.

    Args:
      jaxpr: a call of the loss function, from a key, the parameters, the state and the
        inputs to other results and the state.
      names: of the state's leaves.
      is_row: by leaf of the inputs, whether it is rows.
      twice: traces it with twice as many rows; None if it fails with these.

    Returns:
      Name -> what it depends on.
    """
    first_out = len(jaxpr.outvars) - len(names)
    first_in = len(jaxpr.invars) - len(is_row) - len(names)
    changed = {
        first_out + place: name
        for place, name in enumerate(names)
        if jaxpr.outvars[first_out + place] is not jaxpr.invars[first_in + place]
    }
    if not changed:
        return {}
    rest = len(jaxpr.invars) - 1
    by_rows = tainted_outputs(jaxpr, [False] * (rest + 1 - len(is_row)) + [*is_row])
    by_draws = tainted_outputs(jaxpr, [True, *[False] * rest])
    wide = twice()
    found = {}
    for number, name in changed.items():
        if by_rows[number]:
            found[name] = ROWS
        elif by_draws[number]:
            found[name] = DRAWS
        elif wide is None or _text(jaxpr, number) != _text(wide, number):
            found[name] = NUMBER
    return found


def _text(jaxpr: core.Jaxpr, output: int) -> str:
    """How an output is computed, equal for equal computations."""
    return re.sub("0x[0-9a-f]+", "", str(of_outputs(jaxpr, {output})))


def check_uncoupled(coupled: Mapping[str, str]) -> None:
    """Raise for state that stages can't update as one device does.

    Args:
      coupled: as `coupled_state` returns it.

    Raises:
      ValueError: if there is any.
    """
    if coupled:
        first = [f"{name} ({why})" for name, why in coupled.items()][:3]
        rest = f" and {len(coupled) - 3} more" if len(coupled) > 3 else ""
        named = ", ".join(first) + rest
        raise ValueError(
            f"PipelineModel: state of the model depends on examples: {named}; with "
            "pipe > 1 a part may change only state that depends on its parameters and "
            "on itself (a spectral norm's vectors, a count of calls). Use layers "
            "without it (a GroupNorm or a LayerNorm for a BatchNorm), or pipe=1, where "
            "the model sees full micro-batches."
        )
