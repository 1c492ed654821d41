"""Scheduled programs written by hand, whose times are known: 1 byte a second."""

from jaxpar.compiled.exposed import Communication, read_communication
from jaxpar.compiled.hlo import parse
from jaxpar.compiled.kernel_time import Rates
from jaxpar.compiled.link_rates import LinkRates

TENSOR, DATA = "{{0,1},{2,3}}", "{{0,2},{1,3}}"
"""Groups of two on a mesh of data 2 x tensor 2, whose hosts have two devices."""

HEAD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def program(*lines: str, before: str = "") -> str:
    """A program that runs these lines, on two arrays of 4 and of 8 bytes.

    Args:
      *lines: of the entry, each an instruction; the last is the root.
      before: other computations.
    """
    body = "\n".join(f"  {line}" for line in lines[:-1])
    return f"""HloModule by_hand, is_scheduled=true
{HEAD}{before}
ENTRY %main (x: u8[4], y: u8[8]) -> u8[4] {{
  %x = u8[4]{{0}} parameter(0)
  %y = u8[8]{{0}} parameter(1)
{body}
  ROOT {lines[-1]}
}}
"""


def kernel(name: str, bytes_moved: int) -> str:
    """A kernel that takes as many seconds: it writes bytes, and reads none."""
    return f"%{name} = u8[{bytes_moved}]{{0}} iota(), iota_dimension=0"


def start(name: str, of: str = "x", groups: str = TENSOR, sync: bool = False) -> str:
    """The start of an all-reduce in a group of two: it sends what it is given."""
    said = str(sync).lower()
    size = {"x": 4, "y": 8}[of]
    return (
        f"%{name} = u8[{size}]{{0}} all-reduce-start(%{of}), replica_groups={groups}, "
        f'to_apply=%add, backend_config={{"is_sync":{said}}}'
    )


def done(name: str, of: str, size: int = 4) -> str:
    """Its end."""
    return f"%{name} = u8[{size}]{{0}} all-reduce-done(%{of})"


def communication(text: str, taken: float = 1.0, launch: float = 0.0) -> Communication:
    """Read a program at one byte and one FLOP a second, on data 2 x tensor 2."""
    rates = Rates(memory=1.0, matmuls={"bfloat16": 1.0}, attention=2.0, launch=launch)
    sizes = {"data": 2, "tensor": 2}
    links = LinkRates(sizes, 2, inside_host=1.0, between_hosts=0.5, host=1.0)
    return read_communication(parse(text, taken), rates, links)


def exposed(text: str, taken: float = 1.0) -> dict[str, float]:
    """Collective -> seconds exposed."""
    rows = communication(text, taken).collectives
    return {row.name: row.exposed_seconds for row in rows}
