"""How are numbers, durations and times written on a page of a run?"""

import datetime
import math

_LETTERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def number(value: int | float) -> str:
    """Write a number to about five digits.

    Example:
      >>> number(2.941925), number(4096.0), number(123456.7), number(8.3e-05)
      ('2.9419', '4,096', '123,457', '8.3e-05')
    """
    if not math.isfinite(value):
        return str(float(value))
    if abs(value) >= 1e12:
        return f"{value:.4g}"
    if abs(value) >= 1e4 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.5g}"


def tick(value: int | float) -> str:
    """Write the label of an axis, short.

    Example:
      >>> tick(200_000), tick(0.25), tick(1500), tick(0.0)
      ('200k', '0.25', '1,500', '0')
    """
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    for scale, letter in _LETTERS:
        if abs(value) >= (10 * scale if letter == "k" else scale):
            return f"{value / scale:.4g}{letter}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def duration(seconds: int | float) -> str:
    """Write a duration with its two largest units.

    Example:
      >>> duration(93_784), duration(3_600), duration(75), duration(4.25)
      ('1 d 2 h', '1 h', '1 min 15 s', '4.2 s')
    """
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    parts, left = [], round(seconds)
    for size, name in (*_UNITS, (1, "s")):
        if left >= size or parts:
            parts.append(f"{left // size} {name}" if left // size else "")
            left %= size
    return " ".join(part for part in parts[:2] if part)


def moment(seconds: int | float) -> str:
    """Write a time, given in seconds since 1970, in UTC.

    Example:
      >>> moment(0.0)
      '1970-01-01 00:00'
    """
    try:
        when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return str(seconds)
    return when.strftime("%Y-%m-%d %H:%M")
