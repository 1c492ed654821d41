"""Which link do collectives over some mesh axes use, and how fast is it?"""

import jax
import pytest

from jaxpar.compiled.hardware import load_hardware
from jaxpar.compiled.link_rates import (
    BETWEEN,
    INSIDE,
    count_per_host,
    link_rates_of,
    members_per_host,
    spans_hosts,
)
from jaxpar.mesh import MeshShape, make_mesh

SIZES = {"data": 4, "pipe": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("axes", "per_host", "members", "spans"),
    [
        (("tensor",), 2, 2, False),
        (("tensor",), 1, 1, True),
        (("pipe",), 4, 2, False),
        (("pipe",), 2, 1, True),
        (("data",), 8, 2, True),
        (("data",), 16, 4, False),
        (("data", "tensor"), 8, 4, True),
        ((), 8, 1, False),
    ],
)
def test_groups_span_hosts_by_where_their_devices_are(axes, per_host, members, spans):
    assert members_per_host(axes, SIZES, per_host) == members
    assert spans_hosts(axes, SIZES, per_host) == spans


@pytest.mark.parametrize(
    ("axes", "link", "rate"),
    [
        (("tensor",), INSIDE, 0.8 * 450e9),
        (("data",), BETWEEN, 0.8 * 2 * 50e9),
        (("data", "pipe", "tensor"), BETWEEN, 0.8 * 8 * 50e9),
        ((), INSIDE, 0.8 * 450e9),
    ],
)
def test_a_group_uses_the_links_of_all_its_members_on_a_host(axes, link, rate):
    links = link_rates_of(load_hardware("h200"), SIZES, 8)
    assert links.link(axes) == link
    assert links.rate(axes) == pytest.approx(rate)


def test_devices_that_are_no_gpus_share_one_network():
    mesh = make_mesh(MeshShape(-1), jax.devices())
    assert count_per_host(mesh) == mesh.size
