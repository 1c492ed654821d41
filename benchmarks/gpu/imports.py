"""What may a case import on a machine with a GPU, and what has to be carried there?

Needs the standard library alone: it is imported before anything else may be.
"""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / ".ci" / "constraints" / "main.txt"

IMAGE = ("jax", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "torch", "pytest")
"""What is expected to be installed there, each with what it requires."""

CARRIED = ("jaxtyping", "wadler_lindig", "lazy_loader", "xxhash")
"""What jaxpar imports besides, on the way of a training step or a kernel."""


def wheels(constraints: Path = CONSTRAINTS) -> list[str]:
    """The packages to carry, as pip takes them: "name==version".

    Args:
      constraints: the file that pins the versions, and files that it includes.

    Raises:
      ValueError: if a package has no version there.
    """
    pins = dict(_pins(constraints))
    missing = [name for name in CARRIED if _plain(name) not in pins]
    if missing:
        raise ValueError(
            f"wheels: {', '.join(missing)} must have a version in {constraints}; add "
            "a line NAME==VERSION there."
        )
    return [pins[_plain(name)] for name in CARRIED]


def _pins(constraints: Path) -> Iterator[tuple[str, str]]:
    """Plain name -> line, of a file and of those that it includes."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith("-c "):
            yield from _pins(constraints.parent / line[3:].strip())
        elif "==" in line:
            yield _plain(line.partition("==")[0]), line.strip()


def refuse_others() -> None:
    """Let this process find no installed package that such a machine may lack.

    What is required by an extra of a package is not allowed. Files that belong to no
    installed package, such as this repository's, are not affected.
    """
    allowed = required_by((*IMAGE, *CARRIED))
    refused = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not any(_plain(owner) in allowed for owner in owners)
        and not (ROOT / module).exists()
    }
    sys.meta_path[:] = [Allowed(list(sys.meta_path), refused, allowed)]


def required_by(names: Iterable[str]) -> set[str]:
    """Plain names of installed packages and of all that they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = _plain(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in requires:
            if "extra ==" not in line:
                waiting += re.findall(r"^[\w.-]+", line)
    return found


class Allowed(MetaPathFinder):
    """Finds what the finders before it found, but for refused packages.

    Args:
      finders: those of `sys.meta_path`.
      refused: top-level modules that are not found.
      allowed: plain names of the packages that have metadata.
    """

    def __init__(
        self, finders: Sequence[Any], refused: set[str], allowed: set[str]
    ) -> None:
        self._finders, self.refused, self._allowed = finders, refused, allowed

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        """Find a module; none where its top-level package is refused."""
        if fullname.partition(".")[0] in self.refused:
            return None
        for finder in self._finders:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Find metadata, of allowed packages: pytest loads plugins by it."""
        context = context or importlib.metadata.DistributionFinder.Context()
        for finder in self._finders:
            find = getattr(finder, "find_distributions", None)
            for found in find(context) if find else ():
                if _plain(found.metadata["Name"] or "") in self._allowed:
                    yield found

    def invalidate_caches(self) -> None:
        """Forget what directories held."""
        for finder in self._finders:
            if hasattr(finder, "invalidate_caches"):
                finder.invalidate_caches()


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
