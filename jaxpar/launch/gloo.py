"""Which address do collectives between CPU workers listen on?

jaxlib's gloo resolves the host's name to an address, which may be any of the host's, or
one that other hosts can't reach. To be removed when jax has a setting for it.
"""

from jax._src import distributed, xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]


def listen_on(address: str) -> None:
    """Make this process's CPU collectives listen on one address.

    Args:
      address: of this host. Call it after `jax.distributed.initialize`, and before
        anything in JAX that needs a device.
    """

    def make_client():
        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed.global_state.client, hostname=address
        )
        return xla_bridge.make_cpu_client(collectives=collectives)

    xla_bridge.register_backend_factory(
        "cpu", make_client, priority=0, fail_quietly=False
    )
