"""Do all workers of a run have the same config, code, data and versions?

They compare them through JAX's coordination service, before anything is compiled and
without a collective, so that a worker that differs can be named. JAX's client of that
service is not public; to be replaced when it is.
"""

import hashlib
import json
import socket
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

from jaxpar.launch.worker_environment import current

_SHOWN = 3
_EXCHANGES: dict[str, int] = {}


class DisagreementError(ValueError):
    """Workers of one run differ; the message names them."""


def service() -> Any:
    """JAX's client of its coordination service; None in a run of one process."""
    return distributed.global_state.client


def exchange(name: str, value: Any) -> list[Any]:
    """Send a JSON value to the other workers, and receive theirs.

    Args:
      name: of the value; each worker calls with the same names in the same order.
      value: this worker's.

    Returns:
      The values of all workers, in their order.

    Raises:
      TimeoutError: if a worker does not send a value within the start limit.
    """
    worker, client = current(), service()
    if client is None or jax.process_count() == 1:
        return [value]
    seconds = worker.start_seconds if worker else 300
    turn = _EXCHANGES[name] = _EXCHANGES.get(name, 0) + 1
    key = f"jaxpar/{name}/{turn}"
    client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    return [
        json.loads(_receive(client, f"{key}/{index}", index, seconds))
        for index in range(jax.process_count())
    ]


def _receive(client: Any, key: str, index: int, seconds: int) -> str:
    try:
        return client.blocking_key_value_get(key, 1000 * seconds)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(
            f"worker {index} did not reach the same point within {seconds} s: "
            "its log shows what it is doing instead"
        ) from error


def require_same(config: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Check that workers belong to one run, and that their collectives work.

    Args:
      config: of this worker's run.
      identity: of its data.

    Raises:
      DisagreementError: on all workers, if one differs from the majority.
      RuntimeError: if JAX has another number of processes, or a collective over all of
        them gives a wrong result.
    """
    worker, count = current(), jax.process_count()
    if worker is not None and count != worker.processes:
        raise RuntimeError(
            f"worker {worker.index} is one of {worker.processes}, but JAX has "
            f"{count} processes: nothing may ask jax for its devices before "
            "`jaxpar launch` runs the script"
        )
    if count == 1:
        return
    mine = {
        "config": dict(config),
        "data": dict(identity),
        "code": own_code(),
        "versions": _versions(),
        "host": socket.gethostname(),
    }
    all_of_them = exchange("facts", mine)
    lines = differences(all_of_them)
    if lines:
        raise DisagreementError(
            f"{len(lines)} of {len(all_of_them)} workers differ from the others: "
            f"{'; '.join(lines)}. Start all of them from one config, code and corpus"
        )
    found = multihost_utils.process_allgather(jax.process_index())
    if found.tolist() != list(range(jax.process_count())):
        raise RuntimeError(
            f"gathering the workers' numbers gave {found.tolist()}: the network "
            "between them corrupts collectives"
        )


def differences(facts: list[dict[str, Any]]) -> list[str]:
    """Describe how each worker differs from the majority.

    Args:
      facts: of each worker: section -> name -> value, and ``host``.

    Returns:
      One line for each worker that differs.
    """
    lines = []
    parts = [part for part in facts[0] if part != "host"]
    most = {part: _most_common([each[part] for each in facts]) for part in parts}
    for index, each in enumerate(facts):
        found = [
            f"{part} {name} is {_short(each[part].get(name))}, not "
            f"{_short(most[part].get(name))}"
            for part in parts
            for name in sorted({*each[part], *most[part]})
            if each[part].get(name) != most[part].get(name)
        ]
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        if found:
            differences = ", ".join(found[:_SHOWN] + more)
            lines.append(f"worker {index} ({each['host']}): {differences}")
    return lines


def own_code() -> dict[str, str]:
    """The program's own files imported so far -> their checksums.

    The standard library and installed packages are compared by version instead.
    """
    installed = [Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib", "platlib")]
    found: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or name == "__mp_main__":
            continue
        path = Path(file)
        if any(path.is_relative_to(place) for place in installed) or not path.exists():
            continue
        label = "of the script" if name == "__main__" else name
        found[label] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python} | {name: metadata.version(name) for name in packages}


def _most_common(values: list[Any]) -> Any:
    """The most common value; of equally common ones, the first."""
    texts = [json.dumps(value, sort_keys=True) for value in values]
    return values[texts.index(max(texts, key=texts.count))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
