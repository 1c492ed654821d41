"""What does ``run.json`` say of a run: its settings, and each time that they changed?

Some settings may change when a run goes on, for they change no number but by rounding:
how it is sharded, how long it is, when it is saved. The others make it another run.
"""

import contextlib
import dataclasses
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Set
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxpar.checkpoint.manifest import DamagedError
from jaxpar.checkpoint.places import place_of
from jaxpar.launch.object_stores import is_url
from jaxpar.launch.own_files import is_private, read_json, write_whole
from jaxpar.training.options import OPTIONS
from jaxpar.training.secret_values import command_without_secrets, without_secrets

FILE, CHECKPOINTS = "run.json", "checkpoints"
URL = "checkpoint_url"
"""In ``run.json``: of a run whose checkpoints are in a bucket."""

_PARTS = ("config", "identity", "init_from", "history", "versions", "command", "commit")

SAME_NUMBERS = (
    "accumulate",
    "bad_rows",
    "data_cache",
    "eval_batches",
    "eval_every",
    "keep",
    "mesh",
    "offload",
    "out",
    "recovery",
    "remat",
    "save_every",
    "schedule",
    "sequence_parallel",
    "steps",
    "suites",
    "tensorboard",
    "zero",
)
"""Fields of a config that change no number of a run but by rounding, unless its engine
says otherwise (`jaxpar.engine.compiled_step.StepSpec.changes_with`)."""

OF_RATES = {"steps", "schedule"}
"""Fields on which the learning rate may depend, unless the config has the length of its
schedule as a field; "schedule" is then a pipeline's."""


def as_json(config: Any, identity: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings, as ``run.json`` has them: without secrets."""
    fields = dataclasses.asdict(config)
    own = {name: value for name, value in fields.items() if name not in OPTIONS}
    config = without_secrets(own)
    return json.loads(json.dumps({"config": config, "identity": dict(identity)}))


def with_todays_fields(found: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The record of a run whose recipe had fewer fields at its first start.

    A preset's name gives way to its fields, and a field that was not there had today's
    default.

    Args:
      found: the record.
      config: today's config.
    """
    own = without_secrets(
        {k: v for k, v in found["config"].items() if k not in OPTIONS}
    )
    for field in dataclasses.fields(config):
        presets = field.metadata.get("presets", {})
        there: Any = own.get(field.name)
        value = getattr(config, field.name)
        if isinstance(there, str) and there in presets:
            own[field.name] = _plain(dataclasses.asdict(presets[there]))
        elif isinstance(there, dict) and dataclasses.is_dataclass(value):
            # Of another kind of optimizer, today's fields are not the record's.
            is_same = there.get("kind") == getattr(value, "kind", None)
            own[field.name] = (_defaults_of(value) if is_same else {}) | there
    defaults = {k: v for k, v in _defaults_of(config).items() if k not in OPTIONS}
    return {
        **found,
        "config": {k: v for k, v in defaults.items() if v is not None} | own,
    }


def _defaults_of(config: Any) -> dict[str, Any]:
    """The default of each field that has one, as JSON has it."""
    found = {}
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return _plain(found)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Through JSON and back; what JSON can't have, as its text."""

    def as_values(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        return str(value)

    return json.loads(json.dumps(values, default=as_values))


def resolved(
    wanted: Mapping[str, Any], found: Mapping[str, Any] | None, fixed: Mapping[str, str]
) -> dict[str, Any]:
    """Settings with the values that were fixed at the first start.

    Args:
      wanted: by `as_json`.
      found: the record of the first start; None if this is it.
      fixed: field of the config that is None by default -> the field whose value it
        takes at the first start, and keeps.
    """
    first = (found or wanted)["config"]
    config = dict(wanted["config"])
    for name, source in fixed.items():
        if config[name] is None:
            config[name] = first.get(name) or first[source]
    return {**wanted, "config": config}


def differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """What differs in config and identity: name -> [there, here]."""
    pairs = {}
    for part in ("config", "identity"):
        there, here = found.get(part, {}), wanted[part]
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                pairs[name] = [there.get(name), here.get(name)]
    return pairs


def refused(changed: Mapping[str, list[Any]], may_change: Set[str]) -> list[str]:
    """The changes that make another run, as ``name is there, here``."""
    return [
        f"{part} is {before!r} there, {now!r} here"
        for name, (there, here) in changed.items()
        if name not in may_change
        for part, before, now in _parts(name, there, here)
    ]


def _parts(name: str, there: Any, here: Any) -> list[tuple[str, Any, Any]]:
    """A setting that differs; of two mappings of the same names, what differs."""
    if not (isinstance(there, dict) and isinstance(here, dict)) or (
        there.keys() != here.keys()
    ):
        return [(name, there, here)]
    return [
        (f"{name}.{key}", there[key], here[key])
        for key in there
        if there[key] != here[key]
    ]


def changes_numbers(line: Mapping[str, Any]) -> bool:
    """Whether a line of the history changed a run's numbers more than by rounding."""
    return not line["changed"].keys() <= set(SAME_NUMBERS)


def first_record(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run's first start."""
    return {**wanted, **_software()}


def later_record(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    changed: Mapping[str, list[Any]],
    step: int | None,
) -> dict[str, Any]:
    """The record of a run that goes on with changed settings.

    Args:
      found: the record so far.
      wanted: the settings from now on.
      changed: name -> [before, now].
      step: the step that it goes on from; None before the first checkpoint.

    Returns:
      The record; its "history" has a line for each change.
    """
    if not changed:
        return dict(found)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = {"step": step, "time": now, "changed": dict(changed), **_software()}
    return {**found, **wanted, "history": [*found.get("history", []), line]}


def checkpoints_of(folder: Path, record: Any) -> Path | str:
    """Where a run's checkpoints are: in its folder, or in one of a bucket.

    Args:
      folder: the run's.
      record: the run's, as ``run.json`` has it; anything else for none.
    """
    found = record.get(URL) if isinstance(record, dict) else None
    if isinstance(found, str) and is_url(found):
        return found
    return folder / CHECKPOINTS


def read(folder: Path, url: str | None = None) -> dict[str, Any] | None:
    """The record of a folder's run; None if it holds none.

    Every checkpoint has it too, and gives it where the file is missing or damaged.

    Args:
      folder: the run's.
      url: of the bucket where its checkpoints may be, if the file does not say it.
    """
    found = read_json(folder / FILE)
    if is_record(found):
        return found
    place = place_of(url or folder / CHECKPOINTS)
    for step in place.complete():
        with contextlib.suppress(DamagedError):
            meta = place.step(step).manifest().meta
            if is_record(meta):
                own = {} if url is None else {URL: url}
                return {name: meta[name] for name in _PARTS if name in meta} | own
    return None


def is_record(value: Any) -> bool:
    """Whether the content of a file, or a checkpoint's `meta`, records a run."""
    return isinstance(value, dict) and isinstance(value.get("config"), dict)


def write(folder: Path, record: Mapping[str, Any], *, private: bool = False) -> None:
    """Replace the record atomically; once it is private, it stays so."""
    path = folder / FILE
    text = json.dumps(record, indent=2) + "\n"
    write_whole(path, text, durable=True, private=private or is_private(path))


def _software() -> dict[str, Any]:
    """What runs now: versions, command line and commit."""
    versions = {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("jax", "flax", "optax")
    }
    command = command_without_secrets(sys.argv)
    return {"versions": versions, "command": command, "commit": _commit()}


def _commit() -> str | None:
    """The commit of the script's repository, "+" if files differ; None without one."""
    where = Path(sys.argv[0]).absolute().parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"],
            cwd=where if where.is_dir() else None,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()
