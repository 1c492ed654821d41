"""What does a saved step consist of: files with checksums, leaves, and the rest.

The manifest is the last file to be written, and its own checksum is next to it. What is
loaded of a step matches its manifest bit for bit. Files are never opened by
the names in a manifest: the files that exist are compared with it.
"""

import concurrent.futures
import dataclasses
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.checkpoint.slices import Slices
from jaxpar.launch.own_files import retried, write_whole

FORMAT = 2
"""Increase it when older code can't read what is written from then on."""

MANIFEST, DIGEST = "manifest.json", "manifest.xxh3"

_MOST_BYTES = 256 << 20
"""Largest size of a manifest."""
_LARGE = 1 << 20
"""Bytes above which a file's content is that of arrays."""
_BLOCK = 512 << 10
"""Bytes per read: they stay in a core's cache. A mapped file would end the process
when a disk fails."""
_HASHERS = min(8, os.cpu_count() or 1)
_HEX = re.compile(r"[0-9a-f]{32}")

Entry = tuple[int, str]
"""Bytes and checksum (XXH3, 128 bits) of a file."""


class DamagedError(ValueError):
    """A checkpoint differs from what was saved; the message names the files."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A saved step, without its arrays.

    Attributes:
      step: its number.
      run: the run that saved it.
      leaves: leaf name -> shape and dtype.
      data_states: each process's position in the data.
      meta: the caller's mapping.
      metric: the number that `best` compares; None for none.
      versions: of the software that saved it.
      files: path in the step's folder -> bytes and checksum (XXH3, 128 bits).
      slices: leaf name -> checksums of what the devices held; none of leaves without
        elements, and of steps that older versions saved.
      objects: where the arrays are, in a bucket; None in a folder.
    """

    step: int
    run: str
    leaves: dict[str, LeafSpec]
    data_states: list[Any]
    meta: dict[str, Any]
    metric: float | None
    versions: dict[str, str]
    files: dict[str, Entry] = dataclasses.field(default_factory=dict)
    slices: dict[str, Slices] = dataclasses.field(default_factory=dict)
    objects: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, or of all arrays in a bucket."""
        if self.objects is not None:
            return sum(leaf.num_bytes for leaf in self.leaves.values())
        return sum(size for size, _ in self.files.values())

    def as_json(self) -> bytes:
        """The manifest's text."""
        content = dataclasses.asdict(self) | {"format": FORMAT}
        return json.dumps(content, indent=1).encode()


def seal(
    folder: Path, manifest: Manifest, files: Mapping[str, Entry] | None = None
) -> Manifest:
    """Make the files of a folder durable, and write its manifest.

    Args:
      folder: holds the arrays; not yet under its step's name.
      manifest: of the step, without files.
      files: all of the folder's, by `seal_files`; None to seal them here.

    Returns:
      The manifest with its files.

    Raises:
      OSError: if a file can't be written, synced or read back.
    """
    if files is None:
        files = seal_files(folder, list(sizes_of(folder)))
    sealed = dataclasses.replace(manifest, files=dict(files))
    text = sealed.as_json()
    write_whole(folder / MANIFEST, text, durable=True)
    write_whole(folder / DIGEST, digest(text).encode(), durable=True)
    for directory, _, _ in os.walk(folder, onerror=_raise):
        sync(Path(directory))
    return sealed


def seal_files(folder: Path, names: Sequence[str]) -> dict[str, Entry]:
    """Make files of a folder durable, and hash them.

    Raises:
      OSError: if one can't be synced or read back.
    """
    with concurrent.futures.ThreadPoolExecutor(_HASHERS) as pool:
        entries = pool.map(lambda name: _seal_file(folder / name), names)
        return dict(zip(names, entries, strict=True))


def sizes_of(folder: Path) -> dict[str, int]:
    """The bytes of every file below a folder."""
    return {name: (folder / name).lstat().st_size for name, _ in _walk(folder)}


def read_manifest(path: Path) -> Manifest:
    """Read a step's manifest.

    Args:
      path: the step's folder.

    Raises:
      DamagedError: if it differs from what was written.
      ValueError: if a newer version of jaxpar wrote it.
    """
    return parsed(_read(path / MANIFEST), _read(path / DIGEST), str(path))


def parsed(text: bytes, checksum: bytes, path: str) -> Manifest:
    """Read a step's manifest from what is stored of it.

    Args:
      text: of the manifest.
      checksum: next to it.
      path: of the step, for messages.

    Raises:
      DamagedError, ValueError: as `read_manifest` does.
    """
    name = f"{path}/{MANIFEST}"
    if checksum != digest(text).encode():
        raise DamagedError(f"{name!r} is damaged: {DIGEST} has another checksum")
    try:
        content = json.loads(text)
        if content["format"] > FORMAT:
            raise ValueError(
                f"checkpoint {path!r} has format {content['format']}, and this "
                f"jaxpar reads formats up to {FORMAT}: update jaxpar to restore it"
            )
        return _parsed(content)
    except (KeyError, TypeError, AttributeError, RecursionError, _WrongError) as error:
        raise DamagedError(f"{name!r} is not a manifest ({error!r})") from error
    except json.JSONDecodeError as error:
        raise DamagedError(f"{name!r} is not JSON ({error})") from error


def damages(path: Path, manifest: Manifest, *, of_arrays: bool = True) -> list[str]:
    """Compare a step's files with its manifest, bit for bit.

    Args:
      path: the step's folder.
      manifest: its manifest.
      of_arrays: False to compare only the size of large files, where whoever reads
        the arrays in them compares these in memory.

    Returns:
      One line per damaged file; empty if there is none.
    """
    found = dict(_walk(path))
    for own in (MANIFEST, DIGEST):
        found.pop(own, None)
    missing = [f"{n}: is missing" for n in manifest.files if n not in found]
    wrong = [f"{n}: {why}" for n, why in found.items() if why]
    extra = [
        f"{n}: is not a file of the step" for n in found if n not in manifest.files
    ]
    sound = [n for n, why in found.items() if not why and n in manifest.files]
    with concurrent.futures.ThreadPoolExecutor(_HASHERS) as pool:
        most = None if of_arrays or not manifest.slices else _LARGE
        compared = pool.map(
            lambda name: _compared(path / name, *manifest.files[name], most), sound
        )
        changed = [
            f"{name}: {why}" for name, why in zip(sound, compared, strict=True) if why
        ]
    return sorted({*missing, *wrong, *extra, *changed})


def sizes_differ(path: Path, manifest: Manifest) -> bool:
    """Whether a file is missing or has another size, without reading its content."""
    try:
        return any(
            os.lstat(path / name).st_size != size
            for name, (size, _) in manifest.files.items()
        )
    except OSError:
        return True


def digest(text: bytes) -> str:
    """The checksum of a manifest: XXH3, 128 bits."""
    return xxhash.xxh3_128_hexdigest(text)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _WrongError(Exception):
    """A part of a manifest has the wrong form."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise _WrongError(what)


def _parsed(content: Mapping[str, Any]) -> Manifest:
    """Check every part of a manifest, because its origin is not trusted."""
    _require(type(content["step"]) is int and content["step"] >= 0, "step")
    _require(type(content["run"]) is str, "run")
    _require(type(content["data_states"]) is list, "data_states")
    metric = content["metric"]
    _require(metric is None or type(metric) in (int, float), "metric")
    leaves = {name: _leaf(name, leaf) for name, leaf in content["leaves"].items()}
    files = {name: _file(name, entry) for name, entry in content["files"].items()}
    declared = sum(leaf.num_bytes for leaf in leaves.values())
    stored = sum(size for size, _ in files.values())
    objects = content.get("objects")
    _require(objects is None or (type(objects) is str and is_inside(objects)), "where")
    _require(
        declared <= stored or objects is not None,
        f"leaves of {declared:,} bytes in files of {stored:,}",
    )
    stored_as = content.get("slices", {}).items()
    slices = {name: _slices(name, own, leaves[name]) for name, own in stored_as}
    return Manifest(
        step=content["step"],
        run=content["run"],
        leaves=leaves,
        data_states=content["data_states"],
        meta=dict(content["meta"].items()),
        metric=metric,
        versions=dict(content["versions"].items()),
        files=files,
        slices=slices,
        objects=objects,
    )


def _leaf(name: str, leaf: Mapping[str, Any]) -> LeafSpec:
    shape, dtype = leaf["shape"], leaf["dtype"]
    _require(type(shape) is list and len(shape) <= 32, f"leaf {name!r}: shape")
    _require(all(type(n) is int and n >= 0 for n in shape), f"leaf {name!r}: shape")
    _require(type(dtype) is str, f"leaf {name!r}: dtype")
    spec = LeafSpec(tuple(shape), dtype)
    try:
        _require(spec.num_bytes >= 0, f"leaf {name!r}: shape")
    except (TypeError, ValueError) as error:
        raise _WrongError(f"leaf {name!r}: {error}") from error
    return spec


def _slices(name: str, entry: Mapping[str, Any], leaf: LeafSpec) -> Slices:
    shape, found, whole = entry["shape"], entry["checksums"], leaf.stored.shape
    what = f"leaf {name!r}: slices"
    _require(type(shape) is list and len(shape) == len(whole), what)
    pairs = zip(whole, shape, strict=True)
    _require(
        all(type(own) is int and own > 0 and n % own == 0 for n, own in pairs), what
    )
    slices = Slices(tuple(shape), dict(found.items()))
    count = math.prod(n // own for n, own in zip(whole, shape, strict=True))
    _require(len(found) == count, what)
    _require(all(place in found for place, _ in slices.boxes(whole)), what)
    _require(all(type(x) is str and _HEX.fullmatch(x) for x in found.values()), what)
    return slices


def _file(name: str, entry: Any) -> Entry:
    size, digest = entry
    _require(is_inside(name), f"file {name!r}: the name leaves the folder")
    _require(type(size) is int and size >= 0, f"file {name!r}: size")
    _require(
        type(digest) is str and bool(_HEX.fullmatch(digest)), f"file {name!r}: checksum"
    )
    return size, digest


def is_inside(name: str) -> bool:
    """Whether a name is that of a file below a folder: relative, without ".."."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and "/".join(parts) == name
        and not name.startswith("/")
        and not any(part in (".", "..") for part in parts)
        and not any(c in name for c in "\0\\")
    )


def _walk(folder: Path) -> list[tuple[str, str | None]]:
    """Every file below a folder, and why it is not a regular file.

    Raises:
      OSError: if a folder can't be listed: its files would not be missed.
    """
    return retried(lambda: list(_walked(folder)), folder)


def _walked(folder: Path) -> Iterator[tuple[str, str | None]]:
    for directory, folders, files in os.walk(folder, onerror=_raise):
        for name in sorted(folders + files):
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                continue
            why = None if stat.S_ISREG(mode) else "is a link or not a regular file"
            yield path.relative_to(folder).as_posix(), why


def _raise(error: OSError) -> None:
    raise error


def _seal_file(path: Path) -> Entry:
    sync(path)
    own, size = xxhash.xxh3_128(), 0
    for block in _blocks(path):
        own.update(block)
        size += len(block)
    return size, own.hexdigest()


def _compared(path: Path, size: int, digest: str, most: int | None) -> str | None:
    def compared() -> str | None:
        found = path.lstat().st_size
        if found != size:
            return f"has {found:,} bytes, not {size:,}"
        if most is not None and size > most:
            return None
        own = xxhash.xxh3_128()
        for block in _blocks(path):
            own.update(block)
        is_same = own.hexdigest() == digest
        return None if is_same else "another checksum: bytes have changed"

    try:
        return retried(compared, path)
    except OSError as error:
        return f"can't be read ({error.strerror})"


def _blocks(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_BLOCK, path.lstat().st_size) or 1))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def _read(path: Path) -> bytes:
    """Read a small file that is not a link."""

    def read() -> bytes:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise DamagedError(f"{str(path)!r} is not a file of a checkpoint")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            # A buffer of this size is made first.
            return file.read(status.st_size)

    try:
        return retried(read, path)
    except OSError as error:
        raise DamagedError(f"{str(path)!r} can't be read ({error.strerror})") from error
