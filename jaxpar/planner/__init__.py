"""What would a run cost on hardware that need not be present?

Read `targets` (so many devices of `jaxpar.compiled.hardware`), `work` and `roofline`
(how long a step takes), `plan` (all of it for one step), then `choices`, `search` and
`recipe`.
"""

from jaxpar.lazy import load_modules

load_modules(globals())
