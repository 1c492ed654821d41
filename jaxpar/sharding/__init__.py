"""Where a leaf is stored, where it is computed on, and how it gets between the two.

Read `rules` and `tensor` (names and paths to specs), `zero` (the ZeRO table),
`constrain` (activations), then `collectives`.
"""

from jaxpar.lazy import load_modules

load_modules(globals())
