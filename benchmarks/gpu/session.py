"""What a case is given, and what it may answer."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Rows = Iterator[tuple[str, dict[str, Any]]]
"""Names and numbers; units are in the names of the numbers."""


@dataclasses.dataclass(frozen=True)
class Session:
    """Where a case runs.

    Attributes:
      keep: a folder; each file in it is kept with the results.
      torch_python: an interpreter that has torch.
      dry: whether this is the dry run: toy sizes, on a CPU.
    """

    keep: Path
    torch_python: str
    dry: bool


class NotHereError(Exception):
    """A case can't be measured on this machine; its message says why."""
