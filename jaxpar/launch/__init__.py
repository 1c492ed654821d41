"""How does a run get its devices and processes, and how is it restarted on failures?

A supervisor on every host (`supervisor`, without JAX) passes each worker one
`worker_environment` and watches the workers (`watchdog`). All hosts mount one shared
folder; supervisors coordinate through files in it (`rendezvous`). A worker joins the
others (`join`), and its `heartbeat` records what it is doing; `exit_codes` say how it
ended. `scheduler`, `sbatch`, `k8s` and `ray_hosts` start runs under cluster schedulers.
"""

import lazy_loader

from jaxpar.lazy import load_modules

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
load_modules(globals())
