"""Do all processes of a run compile the same program?

Each traces the model for itself. Programs whose collectives are in another order wait
for each other for ever, or send one another's bytes.
"""

import hashlib
import re
from collections.abc import Mapping
from zlib import crc32

import jax

from jaxpar.checkpoint.processes import gather

_ADDRESS = re.compile(r"\d{9,}")


def check_same_program(lowered: Mapping[str, jax.stages.Lowered]) -> None:
    """Compare this process's programs with the others'; each process must call it.

    Args:
      lowered: a step's programs, by name.

    Raises:
      ValueError: if they differ, naming the first line that does.
    """
    if jax.process_count() == 1:
        return
    texts = {name: without_addresses(x) for name, x in lowered.items()}
    digests = {n: hashlib.sha256(x.encode()).hexdigest() for n, x in texts.items()}
    everyone = gather(digests)
    for name, text in texts.items():
        other = next((i for i, x in enumerate(everyone) if x != everyone[0]), None)
        if other is None or everyone[other].get(name) == everyone[0].get(name):
            continue
        number, line = _first_difference(text.splitlines(), other)
        raise ValueError(
            f"step: process {other} has traced another program ({name!r}) than process "
            f"0: from line {number} of {len(text.splitlines())} on they differ "
            f"({line.strip()[:160]!r} on process {jax.process_index()}). Their "
            "collectives would wait for each other for ever. Have the model, the loss "
            "and the optimizer do the same in each process: no loop over a set (its "
            "order is another in each; sort it), no random numbers without a seed, no "
            "jax.process_index() and no time or file that only one of them sees."
        )


def without_addresses(lowered: jax.stages.Lowered) -> str:
    """A program's text, but for where the host's functions are in memory."""
    return _ADDRESS.sub("", lowered.as_text())


def _first_difference(lines: list[str], other: int) -> tuple[int, str]:
    """Number and text of the first line in which a process differs from the first."""
    theirs = gather([crc32(line.encode()) for line in lines])
    pairs = enumerate(zip(theirs[0], theirs[other], strict=False))
    shorter = min(len(theirs[0]), len(theirs[other]))
    number = next((i for i, (a, b) in pairs if a != b), shorter)
    return number + 1, lines[number] if number < len(lines) else ""
