"""How a run gets its devices and processes, and stays up on them.

A supervisor on every host (`supervisor`, without JAX) starts workers by one contract
(`contract`); the hosts of a run agree through files in its folder (`rendezvous`). A
worker joins the others (`join`), and its pulse (`pulse`) tells what it is at. `slurm`,
`mpi`, `ray` and `k8s` start supervisors or workers where those engines are.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
