"""When is a folder a run's: made for it, or holding the same one, and nobody else's?

``run.json`` records command, config, data identity, versions and commit at the first
start, and every change since. A folder that holds another run is refused and not
modified.
"""

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jaxpar.checkpoint.places import place_of
from jaxpar.checkpoint.processes import from_first, gather
from jaxpar.launch.agreement import require_same
from jaxpar.launch.lease import (
    is_lease,
    read_holder,
    take_lease,
    use_lease,
    use_lease_for,
)
from jaxpar.launch.object_stores import as_url, is_url
from jaxpar.launch.own_files import exists, is_folder, names_in
from jaxpar.launch.worker_environment import current
from jaxpar.training.early_stop import make_early_stop
from jaxpar.training.options import options_of
from jaxpar.training.origin import find_parameters
from jaxpar.training.profile import profiled_steps
from jaxpar.training.record import (
    CHECKPOINTS,
    FILE,
    OF_RATES,
    SAME_NUMBERS,
    URL,
    as_json,
    checkpoints_of,
    differences,
    first_record,
    later_record,
    read,
    refused,
    resolved,
    with_todays_fields,
    write,
)
from jaxpar.training.run import Run
from jaxpar.training.writers import writers_of

_LAUNCH = "launch"
"""The launcher's folder."""

_BEGUN = (CHECKPOINTS, "metrics.jsonl")
"""What a run has written once it has begun."""

_SHARED_SECONDS = 30.0
"""Time for a file of process 0 to be seen by all."""


def open_run(
    folder: str | os.PathLike[str],
    config: Any,
    identity: Mapping[str, Any],
    *,
    may_change: Iterable[str] = SAME_NUMBERS,
    fixed: Mapping[str, str] = MappingProxyType({"schedule_steps": "steps"}),
    change: bool | None = None,
    init_from: str | os.PathLike[str] | None = None,
    checkpoint_url: str | None = None,
) -> Run:
    """Start a run in a folder, or go on with the run that it holds.

    Args:
      folder: for everything that the run writes; made if missing.
      config: the run's config, a dataclass of JSON values. A field "profile" is what
        `jaxpar.train` takes under that name; "patience" and "min_delta" make its
        `early_stop`.
      identity: what else must match to go on (the corpus's sha256).
      may_change: fields of the config that may differ from the last start, because they
        change no number but by rounding. `jaxpar.train` asks the engine whether that
        holds, and records the change. "steps" and "schedule" only of a config with a
        field in `fixed`: another one's learning rate may depend on them.
      fixed: field of the config, None by default -> the field whose value it takes at
        the first start and keeps; a config without the field has nothing fixed.
      change: go on with settings that make another run: a learning rate, a batch size,
        a corpus. They are recorded; see docs/runs.md for what becomes of the state.
        None for the config's field of that name (`jaxpar.StartOptions`), or False.
      init_from: a run's folder, a folder of checkpoints, or safetensors, whose
        parameters a new run begins with; None for the config's field, or to initialise.
      checkpoint_url: of a folder of a bucket, for a new run's checkpoints; None for
        the config's field, or the run's own folder.

    Returns:
      The run; `Run.config` is the config with what is fixed.

    Raises:
      ValueError: if the folder holds another run, or files but no run, or is a file; if
        the processes of the run differ in config, code, data or versions; if the
        config's "profile" is not of its "steps", or its "patience" below 1.
      LeaseHeldError: if another process runs this run.
      PermissionError: if the folder can't be written.
      ModuleNotFoundError: if a writer's package is missing.
    """
    options = options_of(config)
    writers = writers_of(config)
    profiled = profiled_steps(options.profile, getattr(config, "steps", None))
    early_stop = make_early_stop(options.patience, options.min_delta)
    start_from = options.init_from if init_from is None else init_from
    wanted = as_json(config, identity)
    if start_from is not None:
        wanted["init_from"] = str(place_of(start_from))
    url = options.checkpoint_url if checkpoint_url is None else checkpoint_url
    if url is not None:
        wanted[URL] = _url_of(url)
    require_same(wanted["config"], wanted["identity"])
    fixed = {k: v for k, v in fixed.items() if k in wanted["config"]}
    allowed = set(may_change) - (set() if fixed else OF_RATES)
    change = options.change if change is None else change
    asks = _Asked(config, wanted, None if change else frozenset(allowed), fixed)
    record, lease = from_first(lambda: _claim(Path(folder), asks))
    kept = {name: record["config"][name] for name in fixed}
    _say_fixed(record["config"], fixed)
    config = dataclasses.replace(config, **kept)
    run = Run(Path(folder), record, writers, config, change, profiled, early_stop)
    use_lease(Path(folder), lease).keep_for(run)
    if is_url(run.checkpoints):
        use_lease_for(str(run.checkpoints), run.folder)
    _require_shared(Path(folder), lease)
    return run


def _url_of(checkpoint_url: str) -> str:
    """The URL of a folder of a bucket for checkpoints."""
    try:
        if is_url(checkpoint_url):
            return as_url(checkpoint_url)
        why = "is a path; --out says where a run's folder is, with its checkpoints"
    except ValueError as error:
        why = str(error)
    raise ValueError(
        f"checkpoint_url={checkpoint_url!r} must be a folder of a bucket, such as "
        f"s3://bucket/run: {why}"
    )


def _require_shared(folder: Path, lease: int) -> None:
    """Check that every process sees the folder of process 0, by its lease.

    Raises:
      FileNotFoundError: if a process sees another one, or none.
    """
    if jax.process_count() == 1:
        return
    right = gather(_seen(folder, lease))[0]
    # A network file system may show a new file a little later.
    until = time.monotonic() + _SHARED_SECONDS
    while _seen(folder, lease) != right and time.monotonic() < until:
        time.sleep(0.2)
    apart = [i for i, own in enumerate(gather(_seen(folder, lease))) if own != right]
    if apart:
        raise FileNotFoundError(
            f"out={str(folder)!r} is not the same folder for all processes: "
            f"{', '.join(f'process {i}' for i in apart)} can't see what process 0 has "
            "written. Give a folder that all hosts mount (--out)."
        )


def _seen(folder: Path, lease: int) -> list[Any]:
    """What is the same for all that see a lease."""
    holder = read_holder(folder, lease)
    return [holder.hostname, holder.pid, holder.since] if holder else []


def _say_fixed(config: Mapping[str, Any], fixed: Mapping[str, str]) -> None:
    """Say where a run goes on beyond what was fixed at its first start."""
    for name, source in fixed.items():
        if config[source] > config[name] and jax.process_index() == 0:
            print(
                f"{source} {config[source]}, {name} {config[name]} since the first "
                "start: beyond them the last learning rate is held"
            )


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a start asks for.

    Attributes:
      config: the recipe's.
      wanted: the settings, by `as_json`.
      may_change: settings that may differ from the last start; None for all.
      fixed: as `open_run` takes them.
    """

    config: Any
    wanted: dict[str, Any]
    may_change: Set[str] | None
    fixed: Mapping[str, str]


def _claim(folder: Path, asked: _Asked) -> tuple[dict[str, Any], int]:
    """Find or write the run's record, and its lease; called on process 0 only."""
    _require_usable(folder, asked.wanted.get(URL))
    if _record_to_go_on(folder, asked) is None and "init_from" in asked.wanted:
        find_parameters(asked.wanted["init_from"])
    worker = current()
    if worker and worker.lease and _same(worker.folder, folder):
        lease = use_lease(folder, worker.lease)
    else:
        lease = take_lease(folder)
    # Again: whoever had the lease before may have written it.
    found = _record_to_go_on(folder, asked)
    private = options_of(asked.config).private
    if found is not None:
        if private:
            (folder / FILE).chmod(0o600)
        return found, lease.number
    made = first_record(resolved(asked.wanted, None, asked.fixed))
    lease.require()
    write(folder, made, private=private)
    return made, lease.number


def _record_to_go_on(folder: Path, asked: _Asked) -> dict[str, Any] | None:
    """The record of the run in a folder as it goes on; None if none has begun there."""
    found = read(folder, asked.wanted.get(URL))
    if found is None or not _has_begun(folder, found):
        return None
    found = with_todays_fields(found, asked.config)
    now = resolved(asked.wanted, found, asked.fixed)
    kept = {n: now["config"][n] for n in asked.fixed if n not in found["config"]}
    found = {**found, "config": {**found["config"], **kept}}
    _require_same_origin(folder, found, now)
    _require_same_place(folder, found, now)
    changed = differences(found, now)
    wrong = [] if asked.may_change is None else refused(changed, asked.may_change)
    if wrong:
        raise ValueError(
            f"{_named(folder, found)} holds another run: {'; '.join(wrong)}. "
            "Choose another folder (--out), the same settings to resume it, or "
            "--change (open_run(change=True)) to go on with these."
        )
    step = max(place_of(checkpoints_of(folder, found)).complete(), default=None)
    return later_record(found, now, changed, step)


def _named(folder: Path, record: Mapping[str, Any]) -> str:
    """A run's folder, for messages, and the bucket with its checkpoints."""
    place = checkpoints_of(folder, record)
    own = f", with checkpoint_url={place!r}," if is_url(place) else ""
    return f"out={str(folder)!r}{own}"


def _has_begun(folder: Path, record: Mapping[str, Any]) -> bool:
    """Whether a run has begun; a start that made no engine leaves a record alone."""
    if any(exists(folder / name) for name in _BEGUN):
        return True
    place = checkpoints_of(folder, record)
    return is_url(place) and bool(place_of(place).complete())


def _require_same_origin(
    folder: Path, found: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    origin, asked = found.get("init_from"), now.get("init_from")
    if asked is not None and asked != origin:
        began = f"from {origin!r}" if origin else "with parameters of its own"
        raise ValueError(
            f"init_from={asked!r}: the run in out={str(folder)!r} has begun {began}. "
            "Choose another folder (--out) for a new run, or leave --init-from out."
        )


def _require_same_place(
    folder: Path, found: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    asked, there = now.get(URL), checkpoints_of(folder, found)
    if asked is not None and asked != there:
        raise ValueError(
            f"checkpoint_url={asked!r}: the run in out={str(folder)!r} has its "
            f"checkpoints in {str(there)!r}. Leave --checkpoint-url out to go on with "
            "it, or choose another folder (--out) for a new run."
        )


def _same(one: str | Path, other: str | Path) -> bool:
    return Path(one).absolute() == Path(other).absolute()


def _require_usable(folder: Path, url: str | None) -> None:
    """Raise if a folder, or its bucket, holds neither a run nor nothing."""
    if exists(folder) and not is_folder(folder):
        raise ValueError(
            f"out={str(folder)!r} is a file. Choose an empty or a new folder (--out)."
        )
    own = {_LAUNCH, f"{FILE}.tmp"}
    found = set(names_in(folder))
    others = [name for name in found - own if not is_lease(name)]
    if FILE in found or read(folder, url) is not None:
        return
    if others:
        raise ValueError(
            f"out={str(folder)!r} has files but no {FILE}, so it is not a jaxpar run. "
            "Choose an empty or a new folder (--out)."
        )
    if url is not None and place_of(url).complete():
        raise ValueError(
            f"checkpoint_url={url!r} has checkpoints that no run has saved. "
            "Choose an empty folder of a bucket (--checkpoint-url)."
        )
