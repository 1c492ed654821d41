"""Who can connect, and who can read keys?"""

from pathlib import Path

import pytest

from jaxpar.launch.certificates import make_certificates
from jaxpar.launch.security import is_loopback, read_tls, require_secure
from jaxpar.launch.worker_environment import Tls

TLS = Tls("cert", "key", "ca")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("node1", False),
    ],
)
def test_loopback_is_told_from_others(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected


def test_address_that_others_reach_needs_certificates_or_a_word() -> None:
    require_secure("127.0.0.1", None, insecure=False)
    require_secure("node1", TLS, insecure=False)
    require_secure("node1", None, insecure=True)
    with pytest.raises(
        ValueError, match=r"--address node1: others can reach it.*--tls"
    ):
        require_secure("node1", None, insecure=False)


def test_keys_are_this_users_alone(tmp_path: Path) -> None:
    (folder,) = make_certificates(tmp_path / "certs", ["node1"])
    key = folder / "key.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    key.chmod(0o644)
    with pytest.raises(PermissionError, match=r"can be read by others \(mode 644\)"):
        read_tls(folder)
    key.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no key\.pem"):
        read_tls(folder)
