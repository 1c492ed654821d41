"""A clock of certificates that may be set; TLS has the right one."""

import datetime
import types

import pytest

from jaxpar.launch import certificates


def set_clock(monkeypatch: pytest.MonkeyPatch, days: int) -> datetime.datetime:
    """Set it ahead of the right one by days, and say what it shows."""

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) + datetime.timedelta(days=days)

    own = types.SimpleNamespace(**vars(datetime) | {"datetime": Shifted})
    monkeypatch.setattr(certificates, "datetime", own)
    return Shifted.now(datetime.UTC)
