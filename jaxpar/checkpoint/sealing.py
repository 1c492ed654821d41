"""How do the processes of a run share the hashing of a step's files?

Process 0 lists the files and divides them by size: what another host lists of a shared
folder may be older. Each process syncs and hashes its share and sends the checksums
to process 0, which writes them into the manifest.
"""

import heapq
import time
from collections.abc import Mapping
from pathlib import Path

from jaxpar.checkpoint.manifest import Entry, seal_files, sizes_of
from jaxpar.checkpoint.outcome import SaveOutcome
from jaxpar.launch.own_files import exists, pauses

_SECONDS = 3600.0
"""For others to hash their share."""
_APPEARS_SECONDS = 60.0
"""For a file to be seen by another host: NFS caches that a name did not exist."""


def divide(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide files so that the largest share is small.

    The next largest file goes to the smallest share: the largest share has at most 4/3
    of the bytes of the best division's (Graham 1969).

    Args:
      sizes: name -> bytes.
      count: number of shares.

    Returns:
      Names, by share.
    """
    shares: list[list[str]] = [[] for _ in range(count)]
    smallest = [(0, index) for index in range(count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        held, index = smallest[0]
        shares[index].append(name)
        heapq.heapreplace(smallest, (held + sizes[name], index))
    return shares


def seal_together(outcome: SaveOutcome, folder: Path) -> dict[str, Entry]:
    """Make the files of a folder durable and hash them; every process calls it.

    Args:
      outcome: of the save.
      folder: holds the arrays; process 0 calls this once all of it is written.

    Returns:
      On process 0 the name of every file -> bytes and checksum; else none.

    Raises:
      OSError: if a file can't be synced or read back, or has another size here than
        on process 0.
      FailedElsewhereError: if another process has failed.
    """
    sizes: dict[str, int] = {}
    divided = None
    if outcome.index == 0:
        sizes = sizes_of(folder)
        shares = divide(sizes, outcome.count)
        divided = [{name: sizes[name] for name in names} for names in shares]
    share = outcome.scatter("shares", divided, _SECONDS)
    for name in share if outcome.index else ():
        _require_there(outcome, folder / name)
    entries = seal_files(folder, list(share))
    for name, (size, _) in entries.items():
        if size != share[name]:
            raise OSError(
                f"{str(folder / name)!r} has {size:,} bytes here and {share[name]:,} "
                "on process 0: the hosts must mount the same folder"
            )
    every = outcome.gather("checksums", entries, _SECONDS)
    found = {name: entry for each in every for name, entry in each.items()}
    return {name: (found[name][0], found[name][1]) for name in sizes}


def _require_there(outcome: SaveOutcome, path: Path) -> None:
    """Wait until a file that process 0 has listed is seen here."""
    waits = pauses(_APPEARS_SECONDS)
    while not exists(path):
        # Process 0 deletes the files of a save that failed.
        outcome.require_sound()
        pause = next(waits, None)
        if pause is None:
            return
        time.sleep(pause)
