"""Which cases of the long files does `make test` run? The others are `thorough`.

`make test` is what a newcomer runs: one case of everything that matters. Of the files
here it runs the cases that a pattern fits (as fnmatch has it, of the test's name with
its parameters); of every other file, all that is not slow. CI runs them all.
"""

ESSENTIAL: dict[str, tuple[str, ...]] = {}
