"""How is a model's code taken from a checkout of its repository, by path?

Checkouts lie as ``folder/owner/name``. Packages that their code needs and jaxpar does
not are looked for in ``folder/packages`` too.
"""

import __future__

import ast
import contextlib
import importlib
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


class Checkouts:
    """The repositories found in a folder.

    Args:
      folder: where the checkouts are.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, repository: str) -> Path:
        """Return a repository's folder; skips the test where it is not there."""
        path = self.folder / repository
        if not path.is_dir():
            pytest.skip(f"{repository} is not in {self.folder}; clone it there.")
        return path

    def commit(self, repository: str) -> str:
        """Name the commit of a checkout."""
        command = ["git", "-C", str(self.folder / repository), "rev-parse", "HEAD"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        return run.stdout.strip() or "is not there"

    def load(self, repository: str, folder: str, module: str) -> types.ModuleType:
        """Import a module as its repository's programs do: from a folder of it."""
        with self._importable(self.path(repository) / folder):
            return importlib.import_module(module)

    def pick(self, repository: str, file: str, *names: str) -> types.ModuleType:
        """Run only some definitions of a file, and those of its imports that work.

        For a training loop whose loss we want without its data pipeline.

        Args:
          repository: owner/name.
          file: its path in the repository.
          names: functions, classes and constants to define; none for all of them.

        Returns:
          A module of them.
        """
        path = self.path(repository) / file
        picked = types.ModuleType(f"foreign.{path.parent.name}.{path.stem}")
        sys.modules[picked.__name__] = picked  # Where dataclasses look their names up.
        tree = ast.parse(path.read_text(), str(path))
        with self._importable(path.parent):
            for node in tree.body:
                _run(node, path, picked.__dict__, names)
        absent = set(names) - vars(picked).keys()
        assert not absent, f"{path} does not define {sorted(absent)}"
        return picked

    @contextlib.contextmanager
    def _importable(self, root: Path) -> Iterator[None]:
        """Search `root` first, and forget its modules after: examples share names."""
        before, path = set(sys.modules), list(sys.path)
        sys.path[:] = [str(root), *path, str(self.folder / "packages")]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except ModuleNotFoundError as error:
            if error.name is None or (root / error.name).exists():
                raise
            pytest.skip(
                f"{error.name} is not installed: pip install --no-deps --target "
                f"{self.folder}/packages {error.name.partition('.')[0]}"
            )
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if file.startswith(str(root)):
                    del sys.modules[name]


def _run(node: ast.stmt, path: Path, namespace: dict, names: tuple[str, ...]) -> None:
    is_import = isinstance(node, ast.Import | ast.ImportFrom)
    if not is_import and names and not set(_defined(node)) & set(names):
        return
    # As strings, annotations may name what is not installed.
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module([node], []), str(path), "exec", flags)
    with contextlib.suppress(*([ImportError] if is_import else [])):
        exec(code, namespace)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
