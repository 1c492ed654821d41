"""How does one machine have hosts with slow links between them?

Each host is a network namespace with one link to a switch, a bridge in a namespace of
its own. `tc` (a token bucket filter) limits what a host sends, and what its port of the
switch sends to it. Nothing of the machine's own network is changed.
"""

import os
import shutil
import subprocess

_LEAST_BURST = 64 * 1024
_BURST_SECONDS = 5e-3
"""On busy cores the kernel's timer is late by milliseconds: with less to make up for
it, links of 1 Gb/s carried 0.7 beside other work, and 0.96 with this."""
_QUEUE = "latency 50ms"
"""Time that packets wait before they are dropped, where several hosts send to one."""


class NetworkError(RuntimeError):
    """Namespaces, links or limits can't be made here; the message says which."""


class Network:
    """Hosts that only a switch joins; a context that removes them at its end.

    Args:
      num_hosts: how many, 2 to 200.

    Attributes:
      addresses: of the hosts, which others reach them at.

    Raises:
      NetworkError: if it can't be made; what was made is removed.
    """

    def __init__(self, num_hosts: int):
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise NetworkError(f"{program!r} is missing: install iproute2.")
        self.addresses = [f"10.78.0.{1 + host}" for host in range(num_hosts)]
        self._prefix, self._made, self._is_limited = f"jaxpar{os.getpid()}-", [], False
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def limit(self, megabits: float | None) -> None:
        """Set the rate of every link, both ways; connections stay as they are.

        Args:
          megabits: 10^6 bits a second; None for no limit.
        """
        if megabits is None and not self._is_limited:
            return
        how, what = "del", ""
        if megabits is not None:
            burst = burst_bytes(megabits)
            how, what = "replace", f"tbf rate {megabits}mbit burst {burst} {_QUEUE}"
        for host in range(len(self.addresses)):
            for name, device in ((host, "eth0"), ("switch", f"port{host}")):
                given = "tc", "-n", self._space(name), "qdisc", how
                _run(*given, f"dev {device} root", what)
        self._is_limited = megabits is not None

    def plug(self, host: int, state: str) -> None:
        """Plug a host's link in ("up"), or pull it out ("down")."""
        _run("ip", "-n", self._space(host), f"link set eth0 {state}")

    def command(self, host: int, command: list[str]) -> list[str]:
        """A command as it is started on a host."""
        return ["ip", "netns", "exec", self._space(host), *command]

    def close(self) -> None:
        """Remove the namespaces, and with them all links."""
        while self._made:
            _run("ip", "netns", "del", self._made.pop())

    def _space(self, name: int | str) -> str:
        return f"{self._prefix}{name}"

    def _make(self) -> None:
        switch = self._space("switch")
        for name in ("switch", *range(len(self.addresses))):
            _run("ip", "netns", "add", self._space(name))
            self._made.append(self._space(name))
        _run("ip", "-n", switch, "link add bridge0 type bridge")
        _run("ip", "-n", switch, "link set bridge0 up")
        for host, address in enumerate(self.addresses):
            own, port = self._space(host), f"port{host}"
            ends = f"eth0 netns {own} type veth peer name {port} netns {switch}"
            _run("ip", "link", f"add {ends}")
            _run("ip", "-n", switch, f"link set {port} master bridge0 up")
            _run("ip", "-n", own, f"addr add {address}/24 dev eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", own, f"link set {device} up")


def burst_bytes(megabits: float) -> int:
    """What a link of a rate may send at once after a pause, beyond its rate."""
    return max(_LEAST_BURST, round(_BURST_SECONDS * megabits * 1e6 / 8))


def check_possible() -> None:
    """Make two hosts with limited links, and remove them.

    Raises:
      NetworkError: if it is not possible here.
    """
    with Network(2) as network:
        network.limit(100)


def _run(*words: str) -> None:
    command = [part for word in words for part in word.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(
            f"{' '.join(command)!r} failed: {done.stderr.strip() or done.returncode}. "
            "Network namespaces, bridges and tc's token bucket filter need Linux, its "
            "modules veth, bridge and sch_tbf, and root (CAP_NET_ADMIN and "
            "CAP_SYS_ADMIN)."
        )
