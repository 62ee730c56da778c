"""Attention over a sequence that is split over devices, under shard_map, beside the same call on one device:

    python examples/distributed/sequence_jax.py

Each device has a part of q, k and v, gathers all keys and values, and computes the results of its own queries. Which
keys these see depends on the device, as the numbers of ``cu_seqlens_k`` may. JAX derives the gradients: those of keys
and values are summed over the devices and scattered.

Runs on the GPUs, or on the CPU, which XLA presents as four devices. For another number:
XLA_FLAGS=--xla_force_host_platform_device_count=2, and JAX_PLATFORMS=cpu where there is a GPU. Exits with 1 if a result
or a gradient is not the one of one device.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from typing import Any

# XLA takes the last of several.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from aotops import library
from aotops.frontends import jax as F

MAX_DISTANCE = 1e-5  # of float32, relative to the largest element
Array = Any


def attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """The results of a device's part of each, (batch, tokens, heads, head_dim); the parts are equal."""
    tokens = q.shape[1]
    k, v = (jax.lax.all_gather(x, "sequence", axis=1, tiled=True) for x in (k, v))
    if not causal:
        return F.attention(q, k, v)
    # One sequence, in which the last query stands beside the last of the keys that it may see.
    seen = (jax.lax.axis_index("sequence") + 1) * tokens
    queries, keys = jnp.array([0, tokens]), jnp.stack([jnp.zeros_like(seen), seen])
    return F.attention(q, k, v, cu_seqlens=queries, cu_seqlens_k=keys, causal=True)


def with_gradients(function: Any) -> Any:
    def run(q: Array, k: Array, v: Array, dy: Array) -> tuple[Array, ...]:
        y, backward = jax.vjp(function, q, k, v)
        return y, *backward(dy)

    return jax.jit(run)


def compare(causal: bool, tokens: int) -> bool:
    """Prints how far results and gradients are from those of one device, and what moves between devices."""
    mesh, rng = Mesh(np.array(jax.devices()), ("sequence",)), np.random.default_rng(0)
    length = tokens * mesh.size
    arrays = [rng.normal(size=(2, length, heads, 32)).astype("float32") for heads in (4, 2, 2, 4)]
    expected = with_gradients(partial(F.attention, causal=causal))(*jax.device_put(arrays, jax.devices()[0]))

    rows = P(None, "sequence")
    split = jax.shard_map(partial(attention, causal=causal), mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    parts = [jax.device_put(x, NamedSharding(mesh, rows)) for x in arrays]
    program = with_gradients(split).lower(*parts).compile()
    found = program(*parts)

    pairs = zip(jax.device_get(found), jax.device_get(expected), strict=True)
    distances = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]
    moved = sorted(set(re.findall(r" (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", program.as_text())))
    told = ", ".join(f"{name} {x:.1e}" for name, x in zip(("y", "dq", "dk", "dv"), distances, strict=True))
    kind = "causal" if causal else "full"
    print(f"{kind:6} {length} tokens in {mesh.size} parts: {told}; {', '.join(moved) or 'nothing'}", flush=True)
    return max(distances) <= MAX_DISTANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="of a device; default: %(default)s")
    args = parser.parse_args()

    if not library.has_cuda():
        jax.config.update("jax_platforms", "cpu")
    print(f"{len(jax.devices())} devices, {jax.default_backend()}", flush=True)
    equal = [compare(causal, args.tokens) for causal in (False, True)]
    return not all(equal)


if __name__ == "__main__":
    sys.exit(main())
