"""``jaxpar launch certs``: hosts' certificates, made and renewed."""

import dataclasses
from pathlib import Path

import tyro
from rich.console import Console


@dataclasses.dataclass(frozen=True)
class Certs:
    """Make a private authority and a certificate for each host, for mutual TLS.

    TLS covers JAX's coordinator. What workers exchange in collectives is not encrypted:
    where others can listen, join the hosts by WireGuard or the cluster's own fabric.

    hosts: names or addresses, as given to --address.
    out: a new folder, with a folder for each host to be copied to it, and the
      authority's key, which stays there.
    days: validity of the certificates.
    renew: sign those of --out anew, with the same keys; old and new ones work together.
      A run does so by itself where --tls is the folder with all of them.
    """

    hosts: tyro.conf.Positional[tuple[str, ...]] = ()
    out: Path = Path("certs")
    days: int = 365
    renew: bool = False

    def make(self) -> None:
        """Make or renew them, and print where they are.

        Raises:
          ValueError: if hosts are given to renew; and as `make_certificates`.
        """
        if self.renew and self.hosts:
            raise ValueError(
                f"--renew: certificates of {', '.join(self.hosts)} can't be added: "
                "leave the hosts out, or make new ones for all of them without --renew"
            )
        # Slow to import, and for this alone.
        from jaxpar.launch.certificates import (  # noqa: PLC0415
            make_certificates,
            renew_certificates,
        )

        made = (
            renew_certificates(self.out, days=self.days)
            if self.renew
            else make_certificates(self.out, self.hosts, days=self.days)
        )
        console = Console(highlight=False, soft_wrap=True, markup=False)
        for place in made:
            console.print(f"{place.name}: copy {place} there, and launch with --tls")
