"""How does a run lose few steps to a failure, without a read of the shared disk?

Every process keeps the newest state that its devices hold in its host's memory, and a
copy of it in that of another host. After a failure all take the newest step that each
finds: in its own host's memory if a worker has failed, in another's if a host has.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import stat
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import xxhash

from jaxpar.checkpoint import leaves as named
from jaxpar.checkpoint.json_values import as_json
from jaxpar.checkpoint.memory_files import (
    MemoryRecord,
    NotHeldError,
    boxes_of,
    placed,
    read_arrays,
    read_kept,
    seal,
    write_shards,
)
from jaxpar.checkpoint.memory_server import MemoryServer
from jaxpar.checkpoint.places import place_of
from jaxpar.checkpoint.processes import from_first, gather, on_all
from jaxpar.checkpoint.restoring import Restored
from jaxpar.launch.lease import process_place
from jaxpar.launch.own_files import read_json, write_whole
from jaxpar.launch.worker_environment import current
from jaxpar.tree import from_stored, stored_struct, to_stored

ROOT = "/dev/shm"
_TIMELINE, _RUN = "memory.json", "run"


@dataclasses.dataclass(frozen=True)
class _Offer:
    """A file of memory that a process can read, as all processes know it."""

    holder: int
    process: int
    slot: int
    step: int


class MemoryTier:
    """The newest two states of a run in its hosts' memory.

    `Engine.save` and `Engine.restore` take one in place of a folder. What it holds
    outlives the processes and their launchers, not the host; it is read on the mesh and
    by as many processes as have written it, and by the same run alone. All processes
    call every method.

    Args:
      folder: of the run, on a disk that all hosts share: one small file is in it.
      checkpoints: the run's, also in a bucket; None for ``checkpoints`` in its folder.
      root: a folder in memory; None for that of Linux, which is small in containers.

    Raises:
      NotADirectoryError: if there is no such folder in memory.
      PermissionError: if another user has made this run's part of it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        checkpoints: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
    ):
        self._folder = Path(folder).expanduser().absolute()
        self.checkpoints = checkpoints or self._folder / "checkpoints"
        worker = current()
        self._address = _own_address() if worker is None else worker.address
        host = 0 if worker is None else worker.host
        self.memory = _made(Path(root or ROOT), self._folder, host)
        self._index, self._count = jax.process_index(), jax.process_count()
        self._server: MemoryServer | None = None
        self._peers: list[tuple[str, int]] = []
        self._neighbour: int | None = None
        self._timeline: str | None = None
        self._slot, self._next = 1, 0
        self._background = concurrent.futures.ThreadPoolExecutor(1, "memory")
        self._saving: concurrent.futures.Future[None] | None = None
        self._has_warned = False

    def save(
        self,
        step: int,
        tree: Any,
        *,
        data_state: Any = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy a state into this host's memory; the other host's copy follows.

        The step before stays until this one is whole on all hosts. A copy that fails,
        as where the memory has no room, is a warning at the next call.

        Args:
          step: its number.
          tree: of arrays.
          data_state: this process's position in the data, of JSON's types.
          meta: other values, of the same types.
        """
        leaves = named.array_leaves(tree, "tree")
        named.require_global(leaves)
        state, content = as_json("data_state", data_state), as_json("meta", meta or {})
        self.wait()
        self._connect()
        if self._timeline is None:
            self._timeline = from_first(self._new_timeline)
        self._next = 1 - self._slot
        path = self.memory / _name(self._index, self._next)
        held = {n: to_stored(leaf) for n, leaf in leaves.items() if leaf.size}
        own = self._index, self._count, step, self._timeline
        try:
            shards = write_shards(path, held)
            seal(path, MemoryRecord(*own, state, content, shards))
        except OSError as error:
            self._saving = concurrent.futures.Future()
            self._saving.set_exception(error)
            return
        self._saving = self._background.submit(self._share, path.name)

    def wait(self) -> None:
        """Return when what was copied last is whole, on all processes.

        Warns:
          UserWarning: if it is not: with the process and the cause.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        error = saving.exception()
        failed = gather([isinstance(error, _UnsharedError), error and str(error)])
        if all(why is None or is_own for is_own, why in failed):
            self._slot = self._next
        said = [f"process {i}: {why}" for i, (_, why) in enumerate(failed) if why]
        if said and not self._has_warned:
            warnings.warn(
                f"the state is not kept in memory as it should be ({'; '.join(said)}): "
                "a failure may cost the steps since the last checkpoint",
                stacklevel=3,
            )
        self._has_warned = bool(said)

    def restore(self, target: Any) -> Restored:
        """Take the newest step that every process finds, if the disk has none as new.

        Args:
          target: tree of the state, as jax.ShapeDtypeStruct with a sharding each.

        Raises:
          FileNotFoundError: if there is none, of this run on this mesh.
        """
        targets = named.array_leaves(target, "target")
        named.require_shardings(targets)
        structs = {n: stored_struct(leaf) for n, leaf in targets.items() if leaf.size}
        self.wait()
        self._connect()
        timeline, newest = from_first(self._on_disk)
        offers = [
            _Offer(holder, *each)
            for holder, own in enumerate(gather(self._offers(timeline)))
            for each in own
        ]
        for step, slot in sorted({(each.step, each.slot) for each in offers})[::-1]:
            chosen = [x for x in offers if (x.step, x.slot) == (step, slot)]
            if step <= newest or len({x.process for x in chosen}) < self._count:
                continue
            try:
                kept, arrays = on_all(lambda own=chosen: self._read(own, structs))
            except (OSError, ValueError):
                continue  # Damaged or gone on one process: an older one on all.
            self._timeline, self._slot = timeline, slot
            leaves = [
                from_stored(arrays[name], leaf) if leaf.size else named.empty(leaf)
                for name, leaf in targets.items()
            ]
            tree = jax.tree.unflatten(jax.tree.structure(target), leaves)
            return Restored(step, tree, kept.meta, gather(kept.data_state), {})
        raise FileNotFoundError(
            f"the hosts' memory ({str(self.memory)!r}) has no step of the run in "
            f"{str(self._folder)!r} that is whole, newer than its checkpoints, and of "
            "this mesh: restore from the checkpoints"
        )

    def meta(self, step: int) -> dict[str, Any] | None:
        """The other values of a step that this holds; None if it is not the newest."""
        kept = read_kept(self.memory / _name(self._index, self._slot))
        return kept.meta if kept and kept.step == step else None

    def forget(self) -> None:
        """Never restore what was kept so far: the run has left it behind."""
        self.wait()
        self._timeline = from_first(self._new_timeline)

    def close(self, *, delete: bool = False) -> None:
        """End the copies; what is kept stays, or is deleted."""
        self.wait()
        self._background.shutdown()
        if self._server is not None:
            self._server.close()
            self._server = None
        if delete:
            shutil.rmtree(self.memory, ignore_errors=True)

    def _connect(self) -> None:
        """Learn where the other processes are; choose one on another host."""
        if self._server is not None:
            return
        token = from_first(lambda: secrets.token_hex(32))
        self._server = MemoryServer(self.memory, self._address, token)
        host = f"{process_place()} {self.memory}"
        known = gather([list(self._server.address), host])
        self._peers = [(address, port) for (address, port), _ in known]
        hosts = [each for _, each in known]
        others = [
            (self._index + i) % self._count
            for i in range(self._count)
            if hosts[(self._index + i) % self._count] != host
        ]
        before = hosts[: self._index].count(host)
        self._neighbour = others[before % len(others)] if others else None

    def _share(self, name: str) -> None:
        """Give a file to the neighbour."""
        if self._neighbour is None:
            return
        assert self._server is not None, "connected by save"
        try:
            self._server.put(self._peers[self._neighbour], name)
        except OSError as error:
            peer = self._peers[self._neighbour][0]
            raise _UnsharedError(f"no copy of it on {peer} ({error})") from error

    def _offers(self, timeline: str | None) -> list[tuple[int, int, int]]:
        """(process, slot, step) of what this host has."""
        found = []
        for process in range(self._count):
            for slot in (0, 1):
                kept = read_kept(self.memory / _name(process, slot))
                own = timeline, self._count, process
                if kept and (kept.timeline, kept.processes, kept.process) == own:
                    found.append((process, slot, kept.step))
        return found

    def _read(
        self, offers: Sequence[_Offer], structs: Mapping[str, Any]
    ) -> tuple[MemoryRecord, dict[str, jax.Array]]:
        """Read this process's part of a step, from its own host or another."""
        mine = [each for each in offers if each.process == self._index]
        here = [each for each in mine if each.holder == self._index]
        found = (here or mine)[0]
        name = _name(self._index, found.slot)
        if not here:
            assert self._server is not None, "connected by restore"
            self._server.get(self._peers[found.holder], name)
        kept = read_kept(self.memory / name)
        if kept is None or kept.step != found.step:
            raise NotHeldError(f"{name} has changed")
        if boxes_of(structs) != [(x.leaf, x.box, x.dtype) for x in kept.shards]:
            raise NotHeldError(f"{name} is of another mesh or model")
        shards = read_arrays(self.memory / name, kept)
        by_leaf: dict[str, dict[Any, Any]] = {}
        for (leaf, box), array in shards.items():
            by_leaf.setdefault(leaf, {})[box] = array
        return kept, {n: placed(x, by_leaf[n]) for n, x in structs.items()}

    def _on_disk(self) -> tuple[str | None, int]:
        """What is valid, and the newest step of the checkpoints, -1 for none."""
        found = read_json(self._folder / _TIMELINE)
        timeline = found.get("timeline") if isinstance(found, dict) else None
        return timeline, max(place_of(self.checkpoints).complete(), default=-1)

    def _new_timeline(self) -> str:
        new = secrets.token_hex(8)
        text = f'{{"timeline": "{new}"}}\n'
        write_whole(self._folder / _TIMELINE, text, durable=True)
        return new


def require_whole(**asked: Any) -> None:
    """Refuse to read a part of what is in memory, or another step than its newest."""
    for name, value in asked.items():
        if value not in (None, (), {}):
            raise ValueError(
                f"{name}={value!r}: the memory of hosts gives its newest step, whole; "
                "restore from the checkpoints"
            )


class _UnsharedError(OSError):
    """A host has its own copy, and no other host has one."""


def _name(process: int, slot: int) -> str:
    return f"process-{process}.{slot}"


def _made(root: Path, folder: Path, host: int) -> Path:
    """A run's folder in a host's memory, for this user alone."""
    if not root.is_dir():
        raise NotADirectoryError(
            f"root={str(root)!r} must be a folder in memory (a tmpfs), such as "
            f"{ROOT!r} on Linux"
        )
    prefix = f"jaxpar-{os.getuid()}-"
    for other in root.glob(f"{prefix}*"):
        _delete_unused(other)
    name = f"{prefix}{xxhash.xxh64_hexdigest(os.fsencode(folder))}-{host}"
    path = root / name
    path.mkdir(0o700, exist_ok=True)
    status = path.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o077:
        raise PermissionError(
            f"{str(path)!r} is not a folder of this user alone: delete it, or give "
            "another root="
        )
    write_whole(path / _RUN, str(folder))
    return path


def _delete_unused(path: Path) -> None:
    """Delete the memory of a run whose folder is gone."""
    with contextlib.suppress(OSError):
        if path.lstat().st_uid == os.getuid() and not path.is_symlink():
            run = Path((path / _RUN).read_text())
            try:
                run.lstat()
            except FileNotFoundError:
                shutil.rmtree(path, ignore_errors=True)


def _own_address() -> str:
    """Where others reach this host, without a launcher; loopback if it has no name."""
    if jax.process_count() == 1:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
