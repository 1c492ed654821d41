"""Do a run's certificates make TLS between its hosts, and with nobody else?"""

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from jaxpar.launch.certificates import make_certificates
from jaxpar.launch.security import read_tls
from jaxpar.launch.worker_environment import Tls


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


def test_certificate_is_valid_from_an_hour_ago_for_the_days_asked_for(
    tmp_path: Path,
) -> None:
    """Clocks of hosts differ."""
    now = datetime.datetime.now(datetime.UTC)
    (folder,) = make_certificates(tmp_path / "certs", ["node1"], days=2)
    for name in ("cert.pem", "ca.pem"):
        found = x509.load_pem_x509_certificate((folder / name).read_bytes())
        before = now - found.not_valid_before_utc
        after = found.not_valid_after_utc - now
        assert abs(before.total_seconds() - 3600) < 60
        assert abs(after.total_seconds() - 2 * 86400) < 60


def test_authoritys_key_is_not_stored_and_peers_sign_nothing(tmp_path: Path) -> None:
    first, second = make_certificates(tmp_path / "certs", ["node1", "node2"])
    names = sorted(path.name for path in first.iterdir())
    assert names == ["ca.pem", "cert.pem", "key.pem"]
    assert (first / "ca.pem").read_bytes() == (second / "ca.pem").read_bytes()
    assert (first / "key.pem").read_bytes() != (second / "key.pem").read_bytes()
    for name, is_authority in (("ca.pem", True), ("cert.pem", False)):
        found = x509.load_pem_x509_certificate((first / name).read_bytes())
        use = found.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (use.value.ca, use.critical) == (is_authority, True)


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
