"""Does a change leave every compiled program and every step as it was?

    python benchmarks/same_programs.py write before/     # on the commit before
    python benchmarks/same_programs.py write after/      # on the commit after
    python benchmarks/same_programs.py compare before/ after/

Ten configurations are compiled for eight CPU devices and for eight H200s, and each
takes three steps on the CPU devices. What is compared of a program is its text without
what a renamed file or function changes: metadata, tables of source lines, names of
modules, arguments and computations, and the debug locations of kernels. Of the steps,
every bit of the metrics and of the state. The script is copied to the commit before.
"""

import argparse
import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

STEPS = 3
DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration of a GPT's training step.

    Attributes:
      mesh: sizes of the axes.
      options: further arguments of `jaxpar.initialize`.
      fused: whether the optimizer is the fused one, in 8 bits.
      sparse: whether attention is block-sparse.
    """

    mesh: dict[str, int]
    options: dict[str, Any]
    fused: bool = False
    sparse: bool = False


_BF16 = {"precision": "bf16", "accumulate": 4, "zero": 1}

CASES = {
    "zero0": Case({"data": 8}, {"zero": 0, "clip_norm": 1.0}),
    "zero1": Case({"data": 8}, {"zero": 1, "precision": "fp16"}),
    "zero2_accumulate": Case({"data": 8}, {"zero": 2, "accumulate": 2}),
    "zero3": Case({"data": 8}, {"zero": 3}),
    "bf16_tensor": Case({"data": 4, "tensor": 2}, {"zero": 3, "precision": "bf16"}),
    "1f1b": Case({"data": 2, "pipe": 4}, {**_BF16, "schedule": "1f1b"}),
    "interleaved": Case({"data": 4, "pipe": 2}, {**_BF16, "schedule": "interleaved"}),
    "zero_bubble": Case({"pipe": 4, "tensor": 2}, {**_BF16, "schedule": "zero_bubble"}),
    "fused_8_bits": Case({"data": 8}, {"zero": 2, "precision": "bf16"}, fused=True),
    "sparse": Case({"data": 8}, {"zero": 1, "precision": "bf16"}, sparse=True),
}


# What is compared of a program.

_TABLES = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d+ .*\n)*\n*",
    re.MULTILINE,
)
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_METADATA = re.compile(rf",? ?metadata=\{{(?:[^{{}}\"]|{_QUOTED}|\{{[^{{}}]*\}})*\}}")
# A module's fingerprint is of its text, names included.
_FINGERPRINT = re.compile(rf",? ?frontend_attributes=\{{fingerprint_\w+={_QUOTED}\}}")
_HASH = re.compile(rf"kernel_hash = {_QUOTED}, ")
_MODULE = re.compile(rf"(?<= module = )({_QUOTED})")
_NAME = re.compile(r"%[\w.$-]+")
_ARGUMENT = re.compile(r"(?<=[(\s])[\w.-]+: (?=[\w(])")
_MODULE_NAME = re.compile(r"^HloModule [^,\n]+", re.MULTILINE)


def comparable(text: str) -> str:
    """The text of a program without names and places in the source.

    Args:
      text: HLO as ``as_text()`` of a compiled function gives it.

    Returns:
      Text that differs where opcodes, operands, shapes, layouts, attributes, replica
      groups or the order of operations do.
    """
    text = _MODULE.sub(lambda found: _kernel(found[1]), text)
    for removed in (_TABLES, _METADATA, _FINGERPRINT, _HASH):
        text = removed.sub("", text)
    lines = _MODULE_NAME.sub("HloModule", text).splitlines()
    heads = re.compile(r"^(ENTRY )?%.*\) -> .*\{$")
    lines = [_ARGUMENT.sub("", line) if heads.match(line) else line for line in lines]
    numbers: dict[str, str] = {}
    return _NAME.sub(
        lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), "\n".join(lines)
    )


def _kernel(quoted: str) -> str:
    """A checksum of a kernel that a program holds as bytes, without its locations."""
    # Only for text with kernels; jax has no public way to read one.
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    lib = importlib.import_module("jax._src.lib")
    ir = importlib.import_module("jax._src.lib.mlir").ir
    code = re.sub(
        rb"\\([0-9A-F]{2}|.)",
        lambda c: bytes.fromhex(c[1].decode()) if len(c[1]) == 2 else c[1],
        quoted[1:-1].encode(),
    )
    context = mlir.make_ir_context()
    lib.mosaic_gpu_dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    module = ir.Module.parse(code, context)
    plain = str(module.operation.get_asm(enable_debug_info=False))
    return f'"{hashlib.sha256(plain.encode()).hexdigest()}"'


# What is written of a commit.


def write(folder: Path, names: list[str]) -> None:
    """Compile every case, take its steps, and write what is compared.

    Args:
      folder: for a file a case and kind of device, and results.json.
      names: of the cases.
    """
    absent = _first_of("jaxpar.planner.absent_devices", "jaxpar.plan.deviceless")
    absent.prepare_process()
    import jax  # noqa: PLC0415 - after the process is prepared

    jax.config.update("jax_num_cpu_devices", DEVICES)
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in names:
        for kind in ("cpu", "h200"):
            devices = (
                jax.devices()[:DEVICES]
                if kind == "cpu"
                else absent.gpu_devices("h200", 1, DEVICES)
            )
            engine, batch = _engine(CASES[name], devices)
            text = comparable(engine.lower().compile().as_text())
            (folder / f"{name}.{kind}.txt").write_text(text)
            print(f"{name} {kind}: {len(text):,} characters", flush=True)
            if kind == "cpu":
                results[name] = _steps(engine, batch)
    path = folder / "results.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | results, indent=2) + "\n")


def _first_of(*modules: str) -> Any:
    """The first module that this commit has."""
    for module in modules[:-1]:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(module)
    return importlib.import_module(modules[-1])


def _engine(case: Case, devices: Any) -> tuple[Any, Any]:
    import jax  # noqa: PLC0415 - after the process is prepared
    import numpy as np  # noqa: PLC0415
    import optax  # noqa: PLC0415

    import jaxpar  # noqa: PLC0415
    from jaxpar.models import DecoderConfig, decoder_loss  # noqa: PLC0415

    size = {"num_layers": 4, "num_heads": 4, "width": 256, "vocab_size": 512}
    config = DecoderConfig(**size, seq_len=256, remat="full", **_attention(case))
    rows = 16
    tokens = np.random.default_rng(0).integers(0, 512, (STEPS, rows, 257), np.int32)
    struct = jax.ShapeDtypeStruct(tokens.shape[1:], tokens.dtype)
    fused = jaxpar.optim.fused_adamw(1e-3, bits=8) if case.fused else None
    engine = jaxpar.initialize(
        model=_model(config, pipelined="pipe" in case.mesh),
        loss_fn=decoder_loss,
        optimizer=fused or optax.adamw(1e-3),
        sample_batch={"tokens": struct},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(**case.mesh), devices),
        **case.options,
    )
    return engine, [{"tokens": batch} for batch in tokens]


def _model(config: Any, *, pipelined: bool) -> Any:
    models = importlib.import_module("jaxpar.models")
    if hasattr(models, "make_decoder"):
        return models.make_decoder(config)
    if pipelined:
        return models.make_decoder(config)
    return lambda rngs: models.GPT(config, rngs=rngs)


def _attention(case: Case) -> dict[str, Any]:
    from jaxpar.sparse_attention import causal_pattern  # noqa: PLC0415 - as above

    if not case.sparse:
        return {}
    size = {"num_heads": 4, "block": 64, "window": 64, "global_tokens": 64}
    return {"attention": causal_pattern("bigbird", **size)}


def _steps(engine: Any, batches: Any) -> dict[str, str]:
    """Checksums of every step's metrics and of the last state, by leaf."""
    import jax  # noqa: PLC0415 - after the process is prepared

    metrics = [jax.device_get(engine.step(batch)) for batch in batches]
    leaves, _ = jax.tree_util.tree_flatten_with_path((metrics, engine.state))
    return {jax.tree_util.keystr(path): _checksum(jax, leaf) for path, leaf in leaves}


def _checksum(jax: Any, leaf: Any) -> str:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return hashlib.sha256(jax.device_get(leaf).tobytes()).hexdigest()[:16]


# The comparison.


def compare(before: Path, after: Path) -> int:
    """Print what differs, the first lines of it.

    Returns:
      How many programs and checksums differ, or are of one commit alone.
    """
    programs = sorted({path.name for path in [*before.iterdir(), *after.iterdir()]})
    programs.remove("results.json")
    differ = sum(not _same(before / name, after / name) for name in programs)
    old, new = (
        json.loads((folder / "results.json").read_text()) for folder in (before, after)
    )
    for case in sorted({*old, *new}):
        mine, other = old.get(case, {}), new.get(case, {})
        bad = [leaf for leaf in {**mine, **other} if mine.get(leaf) != other.get(leaf)]
        print(f"{case}: {len(mine) - len(bad)} of {len(mine)} checksums are the same")
        for leaf in bad[:3]:
            print(f"  {leaf}: {mine.get(leaf)} before, {other.get(leaf)} after")
        differ += len(bad)
    print(f"{len(programs)} programs, {differ} differences")
    return differ


def _same(before: Path, after: Path) -> bool:
    old, new = (
        path.read_text().splitlines() if path.exists() else []
        for path in (before, after)
    )
    changes = list(difflib.unified_diff(old, new, "before", "after", n=0, lineterm=""))
    print(f"{before.name}: {f'{len(changes)} lines differ' if changes else 'the same'}")
    for line in changes[:8]:
        print(f"  {line[:200]}")
    return not changes


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("write", help="compile and run this commit's cases")
    one.add_argument("folder", type=Path)
    one.add_argument("--case", action="append", choices=CASES, help="only these")
    two = commands.add_parser("compare", help="compare what two commits wrote")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "write":
        os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
        write(args.folder, args.case or list(CASES))
    else:
        sys.exit(1 if compare(args.before, args.after) else 0)


if __name__ == "__main__":
    main()
