"""Is what a cluster can't start refused, with the flag that says it?"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.launch import k8s_job
from jaxpar.launch.certificates import make_certificates
from jaxpar.launch.k8s_job import K8s, check
from jaxpar.launch.security import AUTHORITY, CERTIFICATE, KEY
from tests.launch.jobs import SECURE

ROOT = Path(__file__).resolve().parents[2]
ALONE = K8s(
    script=Path("/app/pretrain.py"), name="gpt", image="team/train:1", claim="runs"
)

REFUSED = [
    ({"name": "GPT_1"}, "--name 'GPT_1': must be lower-case letters, digits and -"),
    ({"name": "1gpt"}, "beginning with a letter"),
    ({"name": "gpt-"}, "ending with a letter or digit"),
    ({"name": ""}, "--name ''"),
    ({"name": "a" * 49}, "at most 48 characters"),
    ({"subdomain": "a.b"}, r"--subdomain 'a\.b'"),
    ({"namespace": "ml team"}, "--namespace 'ml team'"),
    ({"domain": "cluster..local"}, "--domain"),
    ({"claim": ""}, "--claim ''"),
    ({"secret": "Certs"}, "--secret 'Certs'"),
    ({"image": ""}, "--image '': must name an image that has jaxpar"),
    ({"image": "a b"}, "--image 'a b'"),
    ({"hosts": 0}, "--hosts 0: must be at least 1"),
    ({"processes": 0}, "--processes 0: must be at least 1"),
    ({"gpus": -1}, "--gpus -1: must be at least 0"),
    ({"port": 80}, "--port 80: must be from 1024 to 65535"),
    ({"port": 70000}, "--port 70000"),
    ({"restarts": -1}, "--restarts -1"),
    ({"job_restarts": -1}, "--job-restarts -1"),
    ({"user": 0}, "--user 0: must be at least 1"),
    ({"grace": 0}, "--grace 0"),
    ({"gpus": 8, "processes": 3}, "--processes 3: 8 GPUs can't be shared out evenly"),
    ({"script": Path()}, r"SCRIPT '\.': must be a file in the image"),
    ({"mount": Path("runs")}, "--mount runs: must be a folder's whole path"),
    ({"mount": Path("/")}, "--mount /: must be"),
    ({"out": Path("/tmp/a")}, "--out /tmp/a: must be below --mount"),
    ({"out": Path("/runs")}, "--out /runs: must be below"),
    ({"out": Path("/runs/../tmp")}, "must be below"),
    ({"out": Path("runs/a")}, "--out runs/a: must be below"),
    ({"secret": "certs", "insecure": True}, "--insecure: --secret certs has"),
    ({"hosts": 2}, "--hosts 2: other pods can reach the coordinator"),
    ({"secret": "certs", "name": "gpt-7b-pretrain"}, "--name gpt-7b-pretrain: cert"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_done_is_refused_with_its_flag(changes, message):
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(ALONE, **changes))


def test_longest_name_is_a_pods_longest():
    """63 characters, and JobSet counts the six that make a pod's name unique."""
    longest = dataclasses.replace(ALONE, name="a" * 46, hosts=128, insecure=True)
    assert len(f"{longest.name}-node-0-127-abcde") == 63
    check(longest)
    with pytest.raises(ValueError, match="at most 46 characters"):
        check(dataclasses.replace(longest, name="a" * 47))


def test_flags_can_be_had_without_jax_or_tyro():
    program = (
        "import sys, jaxpar.launch.k8s\n"
        "print(sorted({'jax', 'tyro'} & set(sys.modules)))"
    )
    done = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT)
    assert done == "[]\n"


def test_secret_of_the_most_hosts_is_below_the_limit_of_kubernetes(tmp_path):
    """By certificates with the longest name that they take."""
    longest = "n" * (k8s_job._LONGEST_IN_CERTIFICATE - 4) + ".svc"
    (folder,) = make_certificates(tmp_path / "certs", [longest])
    one = sum((folder / name).stat().st_size for name in (CERTIFICATE, KEY))
    size = one * k8s_job.HOSTS_IN_SECRET + (folder / AUTHORITY).stat().st_size
    assert 0.8 * 2**20 < size < 0.95 * 2**20


@pytest.mark.parametrize("hosts", [1, 1000, 1001, 2048])
def test_each_host_has_one_secret(hosts):
    secrets = dataclasses.replace(SECURE, hosts=hosts).secrets
    assert [i for each in secrets.values() for i in each] == list(range(hosts))
    assert next(iter(secrets)).startswith("gpt-certs")
    assert len(secrets) == -(-hosts // 1000)
    assert dataclasses.replace(SECURE, secret=None).secrets == {}
