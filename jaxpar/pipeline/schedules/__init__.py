"""Pipeline schedules: tables of the work in each tick, and their validation."""

from jaxpar.lazy import load_modules

load_modules(globals())
