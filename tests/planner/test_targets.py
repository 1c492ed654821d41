"""Is a target's name read, and a wrong one answered with what is right?"""

import pytest

from jaxpar.planner import targets as module
from jaxpar.planner.targets import parse_target


@pytest.mark.parametrize(
    ("name", "hosts", "per_host", "kind"),
    [
        ("h200:8x8", 8, 8, "h200"),
        ("a100:1x1", 1, 1, "a100"),
        ("b200:64x8", 64, 8, "b200"),
        ("v5e:4x8", 1, 32, "v5e"),
        ("v5p:2x2x4", 1, 16, "v5p"),
        ("cpu:6", 1, 6, None),
    ],
)
def test_name_tells_devices_and_their_hosts(name, hosts, per_host, kind):
    target = parse_target(name)
    assert (target.hosts, target.devices_per_host) == (hosts, per_host)
    assert target.num_devices == hosts * per_host
    assert (target.hardware.kind if target.hardware else None) == kind


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "h20:1x8",
            r"target='h20:1x8': 'h20' must be one of a100, b200, h100, h200, v5e, v5p, "
            r"v6e or cpu\. Did you mean 'h200'",
        ),
        ("h200", r"must be h200:HOSTSxGPUS, such as h200:1x8 for one host or h200:64x"),
        ("h200:64", r"must be h200:HOSTSxGPUS"),
        ("h200:0x8", r"must be h200:HOSTSxGPUS"),
        ("v5e:4x4x4", r"must be v5e:XxY, the slice's shape in chips, such as v5e:4x4"),
        ("v5p:4x4", r"must be v5p:XxYxZ, .* such as v5p:4x4x4"),
        ("cpu:0", r"target='cpu:0' must be cpu:N, N devices, such as cpu:8"),
    ],
)
def test_wrong_name_says_what_is_right(name, message):
    with pytest.raises(ValueError, match=message):
        parse_target(name)


def test_cpu_devices_are_those_of_this_process():
    assert len(parse_target("cpu:8").devices()) == 8
    with pytest.raises(ValueError, match=r"cpu_devices: number=9, but jax has started"):
        parse_target("cpu:9").devices()


def test_target_without_its_compiler_is_planned_on_cpu_devices(monkeypatch):
    monkeypatch.setattr(module, "has_gpu_compiler", lambda: False)
    target = parse_target("h100:1x8")
    assert {device.platform for device in target.devices()} == {"cpu"}
    assert target.remedy == "pip install 'jaxpar[plan-gpu]'"
