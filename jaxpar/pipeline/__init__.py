"""Pipelines: schedules as tables, and the executor that runs any of them."""

from jaxpar.lazy import load_modules

load_modules(globals())
