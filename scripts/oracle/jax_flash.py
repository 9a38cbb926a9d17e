"""Writes JAX's flash attention for TPUs as Mosaic text, with operands and results, for tests/it/mosaic: jax_flash.py FOLDER.

Needs jax 0.10 on a CPU."""

import base64
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import tpu
from jax._src.lib.mlir import ir, passmanager
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as fa

# name, [batch, heads, queries, keys, width], [query block, major key block, key block], element type, causal, bias
CASES = [
    ("one-step", [1, 2, 128, 128, 128], [128, 128, 128], "float32", False, False),
    ("steps", [2, 2, 256, 512, 128], [128, 256, 128], "float32", False, False),
    ("steps-bf16", [1, 2, 256, 512, 128], [128, 128, 128], "bfloat16", False, False),
    ("wide-steps-bf16", [1, 1, 256, 1024, 128], [128, 512, 512], "bfloat16", False, False),
    ("causal", [1, 2, 256, 256, 128], [128, 128, 128], "float32", True, False),
    ("bias", [1, 1, 128, 256, 128], [128, 128, 128], "float32", False, True),
]


def kernel_text(function, arguments):
    """Returns the Mosaic text of the only kernel in the lowered function."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    config = re.search(r'backend_config = "((?:[^"\\]|\\.)*)"', lowered).group(1)
    config = re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m.group(1), 16)), config)
    body, context = base64.b64decode(json.loads(config)["custom_call_config"]["body"]), mlir.make_ir_context()
    with context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(body)
        passmanager.PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
        return str(module)


folder, written = pathlib.Path(sys.argv[1]), []
folder.mkdir(parents=True, exist_ok=True)
for name, [b, h, q, k, d], [block_q, block_k_major, block_k], dtype, causal, bias in CASES:
    rng = np.random.default_rng(len(name))
    draw = lambda *dims: jnp.asarray(rng.standard_normal(dims, dtype=np.float32), dtype)
    operands = [draw(b, h, q, d), draw(b, h, k, d), draw(b, h, k, d)]
    if bias:
        operands.append(draw(b, h, q, k).astype(jnp.float32))
    blocks = fa.BlockSizes(block_q=block_q, block_k_major=block_k_major, block_k=block_k, block_b=1)
    options = dict(causal=causal, sm_scale=d**-0.5, block_sizes=blocks)
    attention = lambda q, k, v, ab=None: fa.flash_attention(q, k, v, ab, **options)
    with jax.default_matmul_precision("highest"):
        (folder / f"{name}.mlir").write_text(kernel_text(attention, operands))
        with pltpu.force_tpu_interpret_mode():
            result = attention(*operands)

    def array(what, x):
        file = f"{name}.{what}.f32"
        np.asarray(x.astype(jnp.float32)).tofile(folder / file)
        return {"file": file, "dtype": "bf16" if x.dtype == jnp.bfloat16 else "f32", "dims": list(x.shape)}

    operands = [array(str(n), x) for n, x in enumerate(operands)]
    written.append({"name": name, "kernel": f"{name}.mlir", "operands": operands, "result": array("result", result)})
(folder / "cases.json").write_text(json.dumps(written, indent=1))
