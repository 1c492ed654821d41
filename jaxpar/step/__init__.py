"""One training step, in the order in which it happens.

Read `state`, `precision`, `loss_scale` and `weighted` (the data that steps carry),
`inputs` and `loss` (how the loss function is called), `gather_at_use` and `gradients`,
`update` (the optimizer's interface), then `train_step`, which calls all of them.
"""

from jaxpar.lazy import load_modules

load_modules(globals())
