"""Does every kind's file say what plans need, and does the compiler get its numbers?"""

import re

import pytest

from jaxpar.compiled.hardware import (
    hardware_of,
    kinds,
    load_hardware,
    target_config,
)


@pytest.mark.parametrize("kind", kinds())
def test_file_has_rates_that_can_be_and_their_sources(kind):
    found = load_hardware(kind)
    assert found.kind == kind
    assert 10e9 < found.memory_bytes < 300e9
    assert 0.5e12 < found.memory_rate < 10e12
    assert set(found.peak) == {"bfloat16", "float16", "float32"}
    assert all(100e12 < rate < 3000e12 for rate in found.peak.values())
    assert found.between_hosts <= found.inside_host
    for fraction in (
        found.memory_achieved,
        found.peak_achieved,
        found.links_achieved,
    ):
        assert 0.5 < fraction < 1
    tables = {"memory", "peak", "links"}
    if found.host_memory_bytes is not None:
        tables |= {"host", "host_work"}
        assert found.host_rate / 2 < found.host_memory_rate < found.memory_rate
        assert 1e9 < found.disk_rate < found.host_rate
        assert found.memory_bytes < found.host_memory_bytes < 1e12
        assert 10e9 < found.host_rate < found.inside_host
        assert 0.5 < found.host_achieved < 1
    assert set(found.sources) == tables
    assert all("achieved: " in source for source in found.sources.values())
    assert bool(found.compiler) == (found.platform == "cuda")


@pytest.mark.parametrize(
    ("called", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("cpu", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_device_that_is_here_is_known_by_the_name_that_jax_has_for_it(called, kind):
    found = hardware_of(called)
    assert (found and found.kind) == kind


def rates(text: str, unit: str) -> dict[int, tuple[float, int, int]]:
    """dtype's number -> clock, units, operations, of one kind of unit."""
    part = text.split(f"{unit}_description")[1].split("_description")[0]
    found = re.findall(
        r"key: (\d+) value { clock_rate_ghz: ([\d.]+) units_per_core: (\d+) "
        r"ops_per_clock: (\d+)",
        part,
    )
    return {int(k): (float(c), int(u), int(n)) for k, c, u, n in found}


def test_compiler_is_told_what_xla_says_of_an_h200():
    """The numbers of XLA's own file, xla/backends/gpu/target_config/specs/h200."""
    text = target_config(load_hardware("h200"))
    assert text.count("{") == text.count("}")
    for line in (
        "core_count: 132",
        "memory_bandwidth: 4800000000000",
        "device_memory_size: 151397597184",
        "major: 9 feature_extension: ACCELERATED_FEATURES",
    ):
        assert line in text
    scalar, matrix = rates(text, "scalar_unit"), rates(text, "matrix_unit")
    assert scalar == {
        4: (1.98, 64, 1), 8: (1.98, 64, 1), 10: (1.98, 128, 2), 11: (1.98, 128, 1),
        12: (1.98, 64, 1), 16: (1.98, 128, 2),
    }  # fmt: skip
    eight_bits = (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)
    assert matrix == {
        **dict.fromkeys(eight_bits, (1.8295201, 4, 1024)),
        **dict.fromkeys((10, 16), (1.8295201, 4, 512)),
        11: (1.8295201, 4, 256),
        12: (1.8295201, 4, 32),
    }
    # And these give the datasheet's peak.
    clock, units, ops = matrix[16]
    peak = 2 * clock * 1e9 * units * ops * 132
    assert peak == pytest.approx(load_hardware("h200").peak["bfloat16"], rel=0.01)


def test_compiler_is_told_nothing_of_units_that_a_file_leaves_out():
    assert "rate_infos" not in target_config(load_hardware("a100"))
