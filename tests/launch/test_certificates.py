"""Do a run's certificates make TLS between its hosts, and with nobody else?"""

import datetime
import shutil
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from jaxpar.launch.certificates import (
    keep_valid,
    make_certificates,
    renew_certificates,
)
from jaxpar.launch.security import read_tls
from jaxpar.launch.worker_environment import Tls
from tests.launch.clock import set_clock


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


def test_authoritys_key_stays_where_it_was_made_and_peers_sign_nothing(
    tmp_path: Path,
) -> None:
    first, second = make_certificates(tmp_path / "certs", ["node1", "node2"])
    own = tmp_path / "certs" / "authority-key.pem"
    assert own.stat().st_mode & 0o777 == 0o600
    assert own.parent.stat().st_mode & 0o777 == 0o700
    names = sorted(path.name for path in first.iterdir())
    assert names == ["ca.pem", "cert.pem", "key.pem"], "a host has it not"
    assert (first / "ca.pem").read_bytes() == (second / "ca.pem").read_bytes()
    assert (first / "key.pem").read_bytes() != (second / "key.pem").read_bytes()
    for name, is_authority in (("ca.pem", True), ("cert.pem", False)):
        found = x509.load_pem_x509_certificate((first / name).read_bytes())
        use = found.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (use.value.ca, use.critical) == (is_authority, True)


def hosts_agree(one: Tls, other: Tls) -> bool:
    """Whether TLS is made between two hosts, either of them being the server."""
    for server, client in ((one, other), (other, one)):
        there = context(ssl.PROTOCOL_TLS_SERVER, server)
        there.verify_mode = ssl.CERT_REQUIRED
        names = x509.load_pem_x509_certificate(Path(server.certificate).read_bytes())
        name = names.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
        try:
            assert shaken(there, context(ssl.PROTOCOL_TLS_CLIENT, client), str(name))
        except ssl.SSLCertVerificationError:
            return False
    return True


def test_certificates_that_have_ended_are_renewed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By real TLS: their end, and a time when some hosts have new ones and others not.

    Old and new ones work together for as long as the old ones are valid.
    """
    certs, copied = tmp_path / "certs", tmp_path / "copied"
    set_clock(monkeypatch, -3)
    folders = make_certificates(certs, ["node1", "10.0.0.2"], days=2)
    set_clock(monkeypatch, 0)
    ended = [read_tls(folder) for folder in folders]
    assert not hosts_agree(*ended)
    keys = [Path(tls.key).read_bytes() for tls in ended]
    renew_certificates(certs, days=1)
    shutil.copytree(folders[1], copied)
    assert hosts_agree(read_tls(folders[0]), read_tls(copied))
    renew_certificates(certs, days=2)
    assert hosts_agree(read_tls(folders[0]), read_tls(copied)), "one is not copied yet"
    assert hosts_agree(*ended), "where they are read again, at a restart"
    assert [Path(tls.key).read_bytes() for tls in ended] == keys
    assert not list(certs.rglob("*.tmp"))
    (stranger,) = make_certificates(tmp_path / "others", ["node1"])
    assert not hosts_agree(read_tls(stranger), read_tls(copied))


def test_certificates_are_renewed_once_a_third_of_their_life_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = make_certificates(tmp_path / "certs", ["node1", "node2"], days=30)
    said: list[str] = []
    tls, before = read_tls(folders[0]), (folders[1] / "cert.pem").read_bytes()
    set_clock(monkeypatch, 19)
    keep_valid(tls, said.append)
    assert not said
    assert (folders[1] / "cert.pem").read_bytes() == before
    for days in (21, 200):  # Soon; and long after, when the run starts again.
        now = set_clock(monkeypatch, days)
        keep_valid(tls, said.append)
        assert (folders[1] / "cert.pem").read_bytes() != before, "all hosts'"
        assert "renewed: they are valid until " in said.pop()
        keep_valid(tls, said.append)
        assert not said
        for name in ("ca.pem", "cert.pem"):
            found = x509.load_pem_x509_certificate((folders[1] / name).read_bytes())
            left = found.not_valid_after_utc - now
            assert abs(left.total_seconds() - 30 * 86400) < 60


@pytest.mark.parametrize("place", ["copied", "others"])
def test_end_is_told_where_the_authoritys_key_is_not(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host's folder that was copied; or beside a key of somebody else's authority."""
    (folder,) = make_certificates(tmp_path / "certs", ["node1"], days=30)
    make_certificates(tmp_path / "others", ["node2"])
    shutil.copytree(folder, tmp_path / place / "node1")
    tls, said = read_tls(tmp_path / place / "node1"), []
    before = Path(tls.certificate).read_bytes()
    set_clock(monkeypatch, 25)
    keep_valid(tls, said.append)
    (line,) = said
    assert "the certificates of --tls end on 20" in line
    assert "jaxpar launch certs --renew" in line
    set_clock(monkeypatch, 31)
    with pytest.raises(ValueError, match=r"--tls: .* ended on 20.* certs --renew"):
        keep_valid(tls, said.append)
    assert Path(tls.certificate).read_bytes() == before


def test_renewing_needs_the_authoritys_key(tmp_path: Path) -> None:
    (folder,) = make_certificates(tmp_path / "certs", ["node1"])
    with pytest.raises(FileNotFoundError, match=r"has no authority-key\.pem.*made"):
        renew_certificates(folder)
    (tmp_path / "certs" / "authority-key.pem").chmod(0o640)
    with pytest.raises(PermissionError, match="can be read by others"):
        renew_certificates(tmp_path / "certs")


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
