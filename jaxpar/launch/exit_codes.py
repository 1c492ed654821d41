"""With which codes do jaxpar's programs exit? Those of sysexits.h if one fits."""

DIVERGED, CORRUPT, SAVE_FAILED, STOPPED = 65, 70, 74, 75
"""Exit codes of a run: bad data; a device error; an I/O error; restart me. The last two
are restarted."""

REFUSED, GAVE_UP, REPLACED = 78, 69, 77
"""Of a worker with an invalid configuration; of a supervisor out of restarts; of a run
whose folder another process has taken over."""

FINAL = (DIVERGED, CORRUPT, REFUSED, REPLACED)
"""Exit codes of workers for which a restart does not help."""
