"""How are plans, searches, schedules and sparse patterns shown: pictures and tables."""

from jaxpar.lazy import load_modules

load_modules(globals())
