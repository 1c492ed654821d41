"""What Orbax's log repeats of an error that the caller gets anyway."""

import logging
import os

import jax

_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"


def drop_repeated_errors() -> None:
    """Keep the tracebacks of a failed save out of Orbax's log.

    Five threads log the error that wait() raises, 150 lines each, through a live
    console. With several processes they stay: a process that hangs on another's
    failure has nothing else to show.
    """
    if jax.process_count() == 1:
        logging.getLogger("absl").addFilter(_is_new)


def _is_new(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _ORBAX in record.pathname)
