"""Who can connect, read keys, and plant compiled programs?"""

import os
import ssl
from pathlib import Path

import jax
import pytest

from jaxpar.launch.certificates import make_certificates
from jaxpar.launch.join import use_private_cache
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


def test_certificates_make_tls_between_hosts(tmp_path: Path) -> None:
    """A client that checks names, and a server that asks for its certificate."""
    hosts = ["node1", "10.0.0.2"]
    folders = make_certificates(tmp_path / "certs", hosts, days=2)
    files = [read_tls(folder) for folder in folders]
    assert [read_tls(tmp_path / "certs", host) for host in hosts] == files
    server = context(ssl.PROTOCOL_TLS_SERVER, files[1])
    server.verify_mode = ssl.CERT_REQUIRED
    assert shaken(server, context(ssl.PROTOCOL_TLS_CLIENT, files[0]), "10.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError, match="match"):
        shaken(server, context(ssl.PROTOCOL_TLS_CLIENT, files[0]), "10.0.0.3")
    (other,) = make_certificates(tmp_path / "others", ["node1"])
    stranger = context(ssl.PROTOCOL_TLS_CLIENT, read_tls(other))
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(server, stranger, "10.0.0.2")


def context(kind: int, tls: Tls) -> ssl.SSLContext:
    made = ssl.SSLContext(kind)
    made.load_cert_chain(tls.certificate, tls.key)
    made.load_verify_locations(tls.authority)
    return made


def shaken(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bool:
    """Shake hands in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(down, up, server_hostname=name),
        server.wrap_bio(up, down, server_side=True),
    ]
    done: set[int] = set()
    for _ in range(10):
        for i, end in enumerate(ends):
            try:
                end.do_handshake()
                done.add(i)
            except ssl.SSLWantReadError:
                continue
    return done == {0, 1}


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


def test_wrong_requests_for_certificates_are_refused(tmp_path: Path) -> None:
    for hosts in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="must be different names"):
            make_certificates(tmp_path / "x", hosts)
    for host in ("../up", "a/b", "", ".hidden"):
        with pytest.raises(ValueError, match="is not a name or address"):
            make_certificates(tmp_path / "x", [host])
    with pytest.raises(ValueError, match="days is 0; it must be above 0"):
        make_certificates(tmp_path / "x", ["a"], days=0)
    assert not (tmp_path / "x").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="has files: give a new folder"):
        make_certificates(tmp_path / "full", ["a"])


def test_cache_of_compiled_programs_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    before = jax.config.jax_compilation_cache_dir
    use_private_cache(tmp_path / "cache")
    assert not set_to, "one was set before"
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None)
    folder = tmp_path / "cache"
    use_private_cache(folder)
    assert set_to["jax_compilation_cache_dir"] == str(folder) != before
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others"):
        use_private_cache(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="another user's, or a link"):
        use_private_cache(tmp_path / "link")
    assert os.getuid() == folder.stat().st_uid
