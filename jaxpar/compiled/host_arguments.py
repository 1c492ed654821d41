"""How does a program for GPUs that are not here take arguments in host memory?

jax 0.11.2 drops the memory kinds of shardings over compile-only GPUs, so that a lowered
module does not say which arguments are on the host. The compiler reads it from an
attribute of each argument, which is set here. To be removed when jax keeps them.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

_KIND = "mhlo.memory_kind"


def name_host_arguments(lowered: jax.stages.Lowered, numbers: Collection[int]) -> None:
    """Say in a lowered program which of its arguments are in the host's memory.

    Args:
      lowered: the program, changed in place.
      numbers: of its arguments, flattened; those that it does not use are not in it.
    """
    lowering: Any = lowered._lowering
    kept = sorted(lowering.compile_args["kept_var_idx"])
    module = lowering._hlo
    with module.context:
        main = next(
            operation
            for operation in module.body.operations
            if ir.StringAttr(operation.attributes["sym_name"]).value == "main"
        )
        kind = ir.StringAttr.get("pinned_host")
        found = []
        for number, attributes in zip(kept, main.attributes["arg_attrs"], strict=True):
            own = {named.name: named.attr for named in ir.DictAttr(attributes)}
            own |= {_KIND: kind} if number in numbers else {}
            found.append(ir.DictAttr.get(own))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(found)
