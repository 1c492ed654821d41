"""The engine: how the arguments of a run become compiled functions and their state.

Read `initialize` (all steps in order), `placement` (how the state is stored),
`batches`, `program` (what is compiled), `compiling` (what is said meanwhile), then
`engine`, which binds them.
"""

from jaxpar.lazy import load_modules

load_modules(globals())
