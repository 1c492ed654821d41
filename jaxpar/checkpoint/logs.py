"""Which of Orbax's log messages repeat what its caller already knows?"""

import logging
import os

import jax

_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"


def quiet_orbax() -> None:
    """Drop redundant messages from Orbax's log, which goes to a live console.

    With several processes the errors stay, because a process that hangs on another's
    failure shows nothing else.
    """
    logger = logging.getLogger("absl")
    logger.addFilter(_is_no_false_alarm)
    if jax.process_count() == 1:
        logger.addFilter(_is_no_repeated_error)


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    """Drop "waiting took long": Orbax counts the time that the caller chose to wait."""
    return not (
        _ORBAX in record.pathname
        and str(record.msg).startswith("Waiting for previous save to complete took")
    )


def _is_no_repeated_error(record: logging.LogRecord) -> bool:
    """Drop the error that wait() raises: five threads log it, 150 lines each."""
    return not (_ORBAX in record.pathname and record.exc_info)
