"""What does a compiled program hold and communicate: read from the program itself.

Read `hlo` (the text, parsed), `collectives` (what it communicates over which axis),
`source_lines` (for which line), `program` (memory and traffic), then `budget`,
`closed_form` (what the ZeRO table predicts) and `explain`. `xla_flags` are the options
that the step is compiled with, `hardware` the rates of devices. Where the time of steps
went is in `trace`, `timeline` and `modules` (by module of the model).
"""

from jaxpar.lazy import load_modules

load_modules(globals())
