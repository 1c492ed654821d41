"""How do the learning rate and the momentum change over a run?

A schedule is a function of the steps that the optimizer has taken: of 0 it is the value
for the first step. Any optimizer takes one as its learning rate; for other numbers see
`optax.inject_hyperparams`.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

Decay = Literal["cosine", "linear", "inverse_sqrt", "wsd"]
"""How a rate falls after its warm-up; "wsd" is warm-up, stable, decay."""


def lr_range_test(
    min_rate: float = 1e-3,
    step_size: int = 2000,
    *,
    step_rate: float = 1.0,
    staircase: bool = False,
) -> optax.Schedule:
    """Make the rate of a range test, which rises until the training diverges.

    It is ``min_rate * (1 + step_rate * step / step_size)``. The rates between which the
    loss falls are good bounds of a run's; `jaxpar.training.rate_range` finds them.

    Args:
      min_rate: rate of the first step.
      step_size: steps in which the rate rises by `step_rate` times `min_rate`.
      step_rate: the rise, as a multiple of `min_rate`.
      staircase: whether the rate rises once in `step_size` steps, by all of it.

    Returns:
      A schedule of a float32 scalar.

    Raises:
      ValueError: if a number is not above 0.

    Example:
      >>> schedule = lr_range_test(0.01, step_size=10, step_rate=2.0)
      >>> [round(float(schedule(step)), 4) for step in (0, 5, 10)]
      [0.01, 0.02, 0.03]

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2017),
    section 3.3; defaults of DeepSpeed's LRRangeTest.
    """
    for name, value in (("min_rate", min_rate), ("step_rate", step_rate)):
        _require(0 < value < math.inf, name, value, "above 0")
    _require(step_size >= 1, "step_size", step_size, "at least 1 step")

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step)
        interval = step // step_size if staircase else step / step_size
        return min_rate * (1.0 + step_rate * interval)

    return schedule


def one_cycle(
    min_rate: float,
    max_rate: float,
    *,
    first_steps: int = 2000,
    second_steps: int | None = None,
    decay_steps: int = 0,
    decay_rate: float = 0.0,
) -> optax.Schedule:
    """Make a rate that rises and falls once, in straight lines, and then decays.

    k steps after the cycle it is ``min_rate / (1 + decay_rate * k / decay_steps)``.

    Args:
      min_rate: rate at both ends of the cycle.
      max_rate: rate between its halves.
      first_steps: steps in which the rate rises.
      second_steps: steps in which it falls; None for `first_steps`.
      decay_steps: steps after the cycle in which the divisor grows by `decay_rate`; 0
        for a constant rate.
      decay_rate: that growth.

    Returns:
      A schedule of a float32 scalar.

    Raises:
      ValueError: if `max_rate` is below `min_rate`, a number is below 0, a half has no
        steps, or `decay_rate` is given without `decay_steps`.

    Example:
      >>> schedule = one_cycle(0.1, 0.3, first_steps=4, second_steps=2)
      >>> [round(float(schedule(step)), 4) for step in (0, 2, 4, 5, 6, 9)]
      [0.1, 0.2, 0.3, 0.2, 0.1, 0.1]

    Source: Smith, "A Disciplined Approach to Neural Network Hyper-Parameters" (2018),
    section 4.2; form and defaults of DeepSpeed's OneCycle.
    """
    _require(0 <= min_rate < math.inf, "min_rate", min_rate, "at least 0")
    least = f"at least min_rate={min_rate}"
    _require(min_rate <= max_rate < math.inf, "max_rate", max_rate, least)
    halves = first_steps, second_steps
    return _cycle(min_rate, max_rate, halves, decay_steps, decay_rate)


def one_cycle_momentum(
    min_momentum: float = 0.8,
    max_momentum: float = 0.9,
    *,
    first_steps: int = 2000,
    second_steps: int | None = None,
    decay_steps: int = 0,
    decay_rate: float = 0.0,
) -> optax.Schedule:
    """Make the momentum of `one_cycle`: it falls where the rate rises, and back.

    k steps after the cycle it is ``max_momentum / (1 + decay_rate * k / decay_steps)``.

    Args:
      min_momentum: momentum between the halves of the cycle.
      max_momentum: momentum at its ends.
      first_steps: steps in which the momentum falls: those of the rate.
      second_steps: steps in which it rises; None for `first_steps`.
      decay_steps: steps after the cycle in which the divisor grows by `decay_rate`; 0
        for a constant momentum.
      decay_rate: that growth.

    Returns:
      A schedule of a float32 scalar, for `optax.inject_hyperparams`.

    Raises:
      ValueError: if the bounds are not in order between 0 and 1, a number is below 0, a
        half has no steps, or `decay_rate` is given without `decay_steps`.

    Example:
      >>> cycle = {"first_steps": 4, "second_steps": 2}
      >>> optimizer = optax.inject_hyperparams(optax.sgd)(
      ...     one_cycle(0.1, 0.3, **cycle), momentum=one_cycle_momentum(**cycle)
      ... )
      >>> state = optimizer.init({"w": jnp.zeros(2)})
      >>> round(float(state.hyperparams["momentum"]), 4)
      0.9

    Source: see `one_cycle`.

    Differs: DeepSpeed multiplies by the growing number, so that momentum would pass 1.
    """
    _require(0 <= min_momentum < 1, "min_momentum", min_momentum, "from 0 to below 1")
    span = f"from min_momentum={min_momentum} to below 1"
    _require(min_momentum <= max_momentum < 1, "max_momentum", max_momentum, span)
    halves = first_steps, second_steps
    return _cycle(max_momentum, min_momentum, halves, decay_steps, decay_rate)


def _cycle(
    ends: float,
    turn: float,
    halves: tuple[int, int | None],
    decay_steps: int,
    decay_rate: float,
) -> optax.Schedule:
    """Go from `ends` to `turn` and back, then decay."""
    first, second = halves[0], halves[0] if halves[1] is None else halves[1]
    for name, value in (("first_steps", first), ("second_steps", second)):
        _require(value >= 1, name, value, "at least 1 step")
    _require(decay_steps >= 0, "decay_steps", decay_steps, "at least 0")
    _require(0 <= decay_rate < math.inf, "decay_rate", decay_rate, "at least 0")
    if decay_rate and not decay_steps:
        raise ValueError(
            f"decay_rate={decay_rate}: nothing decays with decay_steps=0; give the "
            "steps, too."
        )

    def decayed(step: jax.typing.ArrayLike) -> jax.Array:
        return ends / (1.0 + decay_rate * jnp.maximum(step, 0) / max(decay_steps, 1))

    lines = [
        optax.linear_schedule(ends, turn, first),
        optax.linear_schedule(turn, ends, second),
    ]
    return optax.join_schedules([*lines, decayed], [first, first + second])


def warmup_then(
    decay: Decay,
    peak: float,
    *,
    steps: int,
    warmup_steps: int,
    start: float = 0.0,
    end: float = 0.0,
    warmup: Literal["linear", "log"] = "linear",
    decay_steps: int | None = None,
) -> optax.Schedule:
    """Make a rate that rises to its peak and then falls, by a rule of that name.

    W steps of warm-up, ``start + (peak - start) * step / W``, or with "log"
    ``log(step) / log(W)`` in the fraction's place. Then, with f from 0 to 1 over the
    other steps:

    - "cosine": ``end + (peak - end) * (1 + cos(pi f)) / 2``
    - "linear": ``peak + (end - peak) * f``
    - "inverse_sqrt": ``peak * sqrt(W / step)``, and not below `end`
    - "wsd" (warm-up, stable, decay): `peak`; in the last `decay_steps` linear to `end`

    Args:
      decay: the rule.
      peak: the highest rate.
      steps: steps of the run, with the warm-up; later the last rate is held, but by
        "inverse_sqrt", which goes on.
      warmup_steps: W; 0 for none.
      start: rate of the first step, if there is a warm-up.
      end: rate after `steps`.
      warmup: its form.
      decay_steps: of "wsd" only: the steps at the end in which the rate falls; 0 keeps
        it at its peak, None is a tenth of `steps`.

    Returns:
      A schedule of a float32 scalar. With "cosine" and "linear" warm-up it is
      `optax.warmup_cosine_decay_schedule`, to the bit.

    Raises:
      ValueError: if a name is unknown, the run ends before its decay begins, a decay is
        longer than what follows the warm-up, or a rate is below 0 or above the peak.

    Example:
      >>> schedule = warmup_then("wsd", 0.4, steps=100, warmup_steps=4, decay_steps=20)
      >>> [round(float(schedule(step)), 4) for step in (0, 1, 4, 80, 90, 100)]
      [0.0, 0.1, 0.4, 0.4, 0.2, 0.0]

    Source: cosine: Loshchilov & Hutter, "SGDR" (2017), equation 5. inverse_sqrt:
    Vaswani et al., "Attention Is All You Need" (2017), equation 3. wsd: Hu et al.,
    "MiniCPM" (2024), section 4.2; Hägele et al., "Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations" (2024). Logarithmic warm-up: DeepSpeed.

    Differs: the decay of "wsd" is linear, where MiniCPM's is exponential.
    """
    _check_names(decay, warmup)
    _require(0 < peak < math.inf, "peak", peak, "above 0")
    for name, value in (("start", start), ("end", end)):
        _require(0 <= value <= peak, name, value, f"from 0 to peak={peak}")
    _require(warmup_steps >= 0, "warmup_steps", warmup_steps, "at least 0")
    rest = steps - warmup_steps
    more = f"above warmup_steps={warmup_steps}: the decay would end before it begins"
    _require(rest > 0, "steps", steps, more)
    if decay_steps is None:
        decay_steps = min(steps // 10, rest)
    elif decay != "wsd":
        raise ValueError(
            f'decay_steps={decay_steps} is of decay="wsd"; {decay!r} falls from the '
            "end of the warm-up. Leave it out."
        )
    longest = f"from 0 to the {rest} steps after the warm-up"
    _require(0 <= decay_steps <= rest, "decay_steps", decay_steps, longest)
    falls: dict[str, Callable[[], optax.Schedule]] = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, end / peak),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "inverse_sqrt": lambda: _inverse_sqrt(peak, end, max(warmup_steps, 1)),
        "wsd": lambda: optax.linear_schedule(
            peak, end if decay_steps else peak, max(decay_steps, 1), rest - decay_steps
        ),
    }
    if warmup == "log":
        rise = _log_rise(start, peak, warmup_steps)
    else:
        rise = optax.linear_schedule(start, peak, warmup_steps)
    return optax.join_schedules([rise, falls[decay]()], [warmup_steps])


def _check_names(decay: str, warmup: str) -> None:
    rules = get_args(Decay)
    if decay not in rules:
        raise ValueError(f"decay={decay!r} must be one of {', '.join(rules)}.")
    if warmup not in ("linear", "log"):
        raise ValueError(f"warmup={warmup!r} must be 'linear' or 'log'.")


def _inverse_sqrt(peak: float, least: float, warmup_steps: int) -> optax.Schedule:
    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.maximum(step, 0) + warmup_steps  # Of a whole run.
        return jnp.maximum(peak * jnp.sqrt(warmup_steps / step), least)

    return schedule


def _log_rise(start: float, peak: float, steps: int) -> optax.Schedule:
    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        passed = jnp.log(jnp.maximum(jnp.asarray(step), 1)) / math.log(max(steps, 2))
        return start + (peak - start) * passed

    return schedule


def _require(is_right: bool, name: str, value: Any, must: str) -> None:
    if not is_right:
        raise ValueError(f"{name}={value} must be {must}.")
