"""What a case leaves beside its numbers, in few files: one archive, one of XLA's."""

import gzip
import importlib.metadata
import io
import re
import shutil
import tarfile
from pathlib import Path

ARCHIVE_BYTES = 14 << 20
"""Of an archive, after which another is begun: larger files may not come back."""


class Artefacts:
    """The files of a call.

    Args:
      out: the folder for what is kept.
      work: a folder that is deleted after the call.
      device: that is measured.

    Attributes:
      work: as given.
      keep: where a case puts files.
    """

    def __init__(self, out: Path, work: Path, device: str):
        self._out, self.work = out, work
        self.keep, self._written = work / "keep", work / "autotune.txt"
        # XLA does not compile at all with a file that it can't read, such as another
        # version's; a file has the choices for one kind of device.
        kind = re.sub(
            r"[^\w-]+", "-", f"{device} jax{importlib.metadata.version('jax')}"
        )
        self._autotune = out / f"autotune-{kind}.txt"

    def xla_flags(self) -> list[str]:
        """Options that write down what XLA chooses by timing, and use what is known.

        The path that is written is the same for each case, for jax's cache of programs
        depends on it.
        """
        flags = [f"--xla_gpu_dump_autotune_results_to={self._written}"]
        if self._autotune.is_file():
            known = self.work / "known.txt"
            shutil.copyfile(self._autotune, known)
            flags.append(f"--xla_gpu_load_autotune_results_from={known}")
        return flags

    def clear(self) -> None:
        """Empty the folder of the case."""
        shutil.rmtree(self.keep, ignore_errors=True)
        self.keep.mkdir(parents=True)
        self._written.unlink(missing_ok=True)

    def pack(self, title: str, *, is_done: bool) -> None:
        """Keep the files of a case: compressed, in an archive, under its title.

        What XLA was writing when a case was killed is not kept.
        """
        if is_done and self._written.is_file():
            found = self._written.read_text(encoding="utf-8")
            known = ""
            if self._autotune.is_file():
                known = self._autotune.read_text(encoding="utf-8")
            whole = self.work / "merged.txt"
            whole.write_text(merged(known, found), encoding="utf-8")
            shutil.copyfile(whole, self._autotune)
        folder = re.sub(r"[^\w.-]+", "_", title)
        for path in sorted(self.keep.iterdir()):
            packed = gzip.compress(path.read_bytes(), mtime=0)
            with tarfile.open(self._archive(len(packed)), "a") as archive:
                entry = tarfile.TarInfo(f"{folder}/{path.name}.gz")
                entry.size = len(packed)
                archive.addfile(entry, io.BytesIO(packed))

    def _archive(self, more: int) -> Path:
        """The archive that has room; a new one if none has."""
        number = 1
        while True:
            path = self._out / f"artefacts{number}.tar"
            if not path.exists() or path.stat().st_size + more < ARCHIVE_BYTES:
                return path
            number += 1


def merged(known: str, found: str) -> str:
    """Join two files of XLA's autotune results, each entry once.

    They are a protocol buffer as text: fields that occur once, which XLA refuses
    twice, and entries. Where the former differ, such as the version, the newer file
    alone is kept.

    Args:
      known: the older file, empty if there is none.
      found: the newer.

    Returns:
      The file.
    """
    older, newer = _parts(known), _parts(found)
    single = [[part for part in each if "{" not in part] for each in (older, newer)]
    if single[0] != single[1]:
        older = []
    return "".join(f"{part}\n" for part in dict.fromkeys((*older, *newer)))


def _parts(text: str) -> list[str]:
    """The fields at the top level, each with its lines."""
    parts: list[list[str]] = []
    for line in text.splitlines():
        if line and not line[0].isspace() and line[0] != "}":
            parts.append([])
        if parts:
            parts[-1].append(line)
    return ["\n".join(part).strip() for part in parts]
