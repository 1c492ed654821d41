"""Which codes do jaxpar's programs end with? Those of sysexits.h where one fits."""

DIVERGED, CORRUPT, SAVE_FAILED, STOPPED = 65, 70, 74, 75
"""Of a run: bad data; a device; input or output; start me again."""

REFUSED, GAVE_UP = 78, 69
"""Of a worker that can't start as it was asked to; of a supervisor that has tried."""

FINAL = (DIVERGED, CORRUPT, SAVE_FAILED, REFUSED)
"""Codes of workers that starting again would not mend."""
