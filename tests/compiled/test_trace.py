"""Is a trace read as jax wrote it: operations by device, and phases of the host?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.compiled.trace import Trace, read_trace

# As the format is documented (tsl/profiler/protobuf/xplane.proto) and XLA's GPU tracer
# fills it: a plane a device, a line a stream, and the instruction's name as a stat. No
# GPU has written this one.
GPU = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #20(Compute)" timestamp_ns: 1000
    events {
      metadata_id: 1 offset_ps: 0 duration_ps: 3000000
      stats { metadata_id: 1 str_value: "fusion.3" }
      stats { metadata_id: 2 str_value: "jit_flat_step" }
    }
    events { metadata_id: 3 offset_ps: 8000000 duration_ps: 1000000 }
  }
  lines {
    name: "Stream #25(Compute)" timestamp_ns: 1000
    events {
      metadata_id: 2 offset_ps: 1000000 duration_ps: 5000000
      stats { metadata_id: 1 ref_value: 3 }
      stats { metadata_id: 2 str_value: "jit_flat_step" }
    }
  }
  lines {
    name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion_3" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllReduce" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyH2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 3 value { id: 3 name: "all-reduce-start.1" } }
}
planes {
  name: "/host:CPU"
  lines {
    name: "python" timestamp_ns: 900
    events {
      metadata_id: 1 offset_ps: 0 duration_ps: 9000000
      stats { metadata_id: 1 int64_value: 7 }
    }
    events { metadata_id: 2 offset_ps: 50000 duration_ps: 40000 }
  }
  event_metadata { key: 1 value { id: 1 name: "train" } }
  event_metadata { key: 2 value { id: 2 name: "loop/data" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } }
}
"""

# As XLA:CPU writes an operation that returns before it is done: its end is an event of
# another thread, with the same number.
CPU = """
planes {
  name: "/host:CPU"
  lines {
    name: "tf_XLAPjRtCpuClient/1" timestamp_ns: 1000
    events {
      metadata_id: 1 offset_ps: 0 duration_ps: 1000000
      stats { metadata_id: 1 str_value: "dot.1" }
      stats { metadata_id: 2 str_value: "jit_flat_step" }
      stats { metadata_id: 3 int64_value: 5 }
      stats { metadata_id: 4 uint64_value: 77 }
    }
  }
  lines {
    name: "tf_XLAEigen/2" timestamp_ns: 1000
    events {
      metadata_id: 2 offset_ps: 6000000 duration_ps: 100
      stats { metadata_id: 5 uint64_value: 77 }
    }
  }
  event_metadata { key: 1 value { id: 1 name: "dot.1" } }
  event_metadata { key: 2 value { id: 2 name: "end: dot.1" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 3 value { id: 3 name: "device_ordinal" } }
  stat_metadata { key: 4 value { id: 4 name: "_p" } }
  stat_metadata { key: 5 value { id: 5 name: "_c" } }
}
"""


def read(text: str, *annotations: str) -> Trace:
    data = ProfileData.text_proto_to_serialized_xspace(text)
    return read_trace(ProfileData.from_serialized_xspace(data), annotations, "train")


def test_operation_of_a_cpu_lasts_until_its_end_event():
    trace = read(CPU)
    (op,) = trace.devices["cpu:5"]
    assert (op.op, op.program) == ("dot.1", "jit_flat_step")
    assert (op.start, op.end) == (pytest.approx(1e-6), pytest.approx(7e-6, rel=1e-3))


def test_end_event_without_a_number_is_of_no_operation():
    numbers = "stats { metadata_id: 4 uint64_value: 77 }"
    ends = "stats { metadata_id: 5 uint64_value: 77 }"
    assert numbers in CPU
    assert ends in CPU
    trace = read(CPU.replace(numbers, "").replace(ends, ""))
    (op,) = trace.devices["cpu:5"]
    assert (op.start, op.end) == (pytest.approx(1e-6), pytest.approx(2e-6, rel=1e-3))


def test_trace_without_a_step_has_none():
    trace = read(CPU, "loop/data")
    assert (trace.steps, trace.host) == ({}, {"loop/data": []})


def test_kernels_of_a_gpu_are_read_from_its_streams():
    trace = read(GPU, "loop/data", "loop/save")
    (ops,) = trace.devices.values()
    found = sorted((op.op, op.program, op.start, op.end) for op in ops)
    microseconds = [(name, program, a * 1e6, b * 1e6) for name, program, a, b in found]
    assert microseconds == [
        ("MemcpyH2D", "", pytest.approx(9), pytest.approx(10)),
        ("all-reduce-start.1", "jit_flat_step", pytest.approx(2), pytest.approx(7)),
        ("fusion.3", "jit_flat_step", pytest.approx(1), pytest.approx(4)),
    ]
    assert trace.steps == {7: (pytest.approx(0.9e-6), pytest.approx(9.9e-6))}
    ((start, end),) = trace.host["loop/data"]
    assert (start, end) == (pytest.approx(0.95e-6), pytest.approx(0.99e-6))
    assert trace.host["loop/save"] == []


def test_operations_of_cpu_devices_are_those_of_the_program(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("data")))
    step = jax.jit(lambda x: jnp.tanh(x @ jnp.ones((64, 64))).sum())
    text = step.lower(x).compile().as_text() or ""
    step(x).block_until_ready()
    jax.profiler.start_trace(tmp_path)
    with jax.profiler.StepTraceAnnotation("train", step_num=3):
        for _ in range(2):
            step(x).block_until_ready()
    jax.profiler.stop_trace()
    (file,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    trace = read_trace(ProfileData.from_file(str(file)), (), "train")
    assert sorted(trace.devices) == ["cpu:0", "cpu:1"]
    ((start, end),) = trace.steps.values()
    for ops in trace.devices.values():
        assert len({op.program for op in ops}) == 1
        assert all(f"%{op.op} " in text for op in ops)
        assert all(start <= op.start <= op.end <= end for op in ops)
        reduced = [op for op in ops if op.op.startswith("all-reduce")]
        assert len(reduced) == 2, "a run each"
