"""Connections of supervisors that end with their test."""

import time
from collections.abc import Callable
from typing import Any

from jaxpar.launch.link import Link
from jaxpar.launch.store import Store

SECRET = bytes(32)
_open: list[Any] = []


def close_all() -> None:
    while _open:
        _open.pop().close()


def opened(made: Any) -> Any:
    _open.append(made)
    return made


def joined(store: Store, host: int, secret: bytes = SECRET) -> Link:
    link = opened(Link(host))
    link.connect("127.0.0.1", store.port, secret)
    return link


def until(found: Callable[[], Any], *steps: Callable[[], Any]) -> Any:
    """Take turns until there is a result."""
    limit = time.monotonic() + 5
    while not (value := found()):
        assert time.monotonic() < limit
        for step in steps:
            step()
    return value
