"""Does `jaxpar launch certs` make certificates, and renew them?"""

from jaxpar.cli.main import main
from tests.cli.test_launch import refused


def test_certificates_are_made_and_renewed_by_name(tmp_path, capsys) -> None:
    out = tmp_path / "certs"
    main(["launch", "certs", "node1", f"--out={out}"])
    before = (out / "node1" / "cert.pem").read_bytes()
    told = capsys.readouterr().out
    main(["launch", "certs", "--renew", f"--out={out}"])
    assert capsys.readouterr().out == told
    assert (out / "node1" / "cert.pem").read_bytes() != before
    said = refused(capsys, "certs", "--renew", "node2", f"--out={out}")
    assert "--renew: certificates of node2 can't be added: leave the hosts out" in said
