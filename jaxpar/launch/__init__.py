"""How a run gets its devices and processes, and stays up on them.

A supervisor on every host (`supervisor`, without JAX) starts workers by one
contract (`worker_environment`) and watches them (`watchdog`); the hosts of a run agree
through files in its folder (`rendezvous`). A worker joins the others (`join`), and its
`heartbeat` says what it is doing. `scheduler`, `sbatch`, `k8s` and `ray_trainer` start
runs by the schedulers that clusters have.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
