"""Predicts the memory of a device from shapes and shardings alone, which takes seconds instead of the minutes of a compiler.

    parameters, optimizer   exact
    gradients               float32, sharded as the weights; those of the embedding and of the head are unsharded until they are reduced
    activations             arrays that the traced backward pass keeps, sharded as activations are
    gathered_weights        copies of the shards in the compute type, and two layers, the embedding and the head unsharded
    temporaries             the larger of what a layer recomputes in its backward pass and the gradient of the logits

Without `execution.remat`, XLA keeps fewer activations than the trace, because it recomputes cheap ones in fused operations. The share
was measured against compiled steps (docs/measured.md).
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from argosy.parallel.place import row_shares
from argosy.run.memory import saved_activations, state_bytes

# The share of the traced activations that XLA keeps, by how much is computed again.
KEPT_SHARE = {"none": 0.85, "dots": 0.9, "full": 1.0}
# The share of what one layer computes again that exists at once.
AGAIN_SHARE = 0.62
# Copies of the logits in float32, in their loss and its gradient; the gradient is narrower.
LOGITS = 1.5


def memory_by_kind(assembly: Any) -> dict[str, int]:
    """Predicts the bytes on a device by kind, before anything is compiled."""
    run, mesh = assembly.run, assembly.mesh
    state = state_bytes(assembly.shapes, assembly.places, mesh, assembly.target, assembly.roles)
    itemsize, remat = assembly.decided.dtype.itemsize, run.execution.remat
    arrays, vocab = activations(assembly), getattr(run.model, "vocab", None)
    logits = sum(size for size, shape in arrays if shape[-1] == vocab)
    share = KEPT_SHARE[remat]
    layers, outside, outside_trained = _weights(assembly)
    split = mesh.shape["fsdp"] > 1
    gathered = 0.0 if not split else layers * (2 if run.execution.gather == "each" else max(1, getattr(run.model, "layers", 1)))
    # The head's phase of the backward pass, and that of the layers: one follows the other, so the larger counts.
    head = {"gathered_weights": itemsize * outside * split, "temporaries": (LOGITS - 1) * logits, "activations": logits}
    inside = {"gathered_weights": itemsize * gathered, "temporaries": AGAIN_SHARE * recomputed_bytes(assembly), "activations": 0.0}
    phase = max(head, inside, key=lambda part: sum(part.values()))
    return {
        "parameters": state["parameters"],
        "optimizer": state["optimizer"],
        # Those of embedding and head are summed in float32 before each device keeps its share.
        "gradients": state["gradients"] + int(4 * outside_trained * split),
        "activations": int(share * (sum(size for size, _ in arrays) - logits) + phase["activations"]),
        "gathered_weights": int(_copies(assembly) + phase["gathered_weights"]),
        "temporaries": int(phase["temporaries"]),
    }


def activations(assembly: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Returns, for each array that the backward pass keeps, its bytes on a device and its global shape."""
    run, mesh = assembly.run, assembly.mesh
    rows, tokens = run.data.batch // run.accumulate, run.data.sequence
    shares, tensor = row_shares(mesh) * mesh.shape["context"], mesh.shape["tensor"]
    wide = _split_sizes(run.model) if tensor > 1 else set[int]()
    stages = mesh.shape["stage"]
    out = []
    for leaf in saved_activations(assembly):
        whole = math.prod(leaf.shape) * leaf.dtype.itemsize
        of_rows = any(n in (rows, rows * tokens) or (n % tokens == 0 and n >= tokens > 1) for n in leaf.shape)
        if not of_rows:
            # A weight in the type of the products, which counts among the gathered ones.
            continue
        split = shares * (tensor if any(n in wide for n in leaf.shape[1:]) else 1)
        split *= stages if len(leaf.shape) > 3 and stages > 1 else 1
        out.append((whole // split, tuple(leaf.shape)))
    return out


def _split_sizes(config: Any) -> set[int]:
    """Returns the sizes of the axes that `mesh.tensor` splits."""
    names = ("heads", "kv_heads", "ffn", "vocab")
    return {int(getattr(config, name)) for name in names if getattr(config, name, None)} - {getattr(config, "width", None)}


def _copies(assembly: Any) -> int:
    """Computes the bytes of the copies of a device's float32 weights in the compute type."""
    itemsize, places = assembly.decided.dtype.itemsize, assembly.places.params | assembly.places.rest
    if itemsize == 4:
        return 0
    arrays = (assembly.shapes.params | assembly.shapes.rest).items()
    wide = [(a, s) for a, s in arrays if getattr(s, "dtype", None) == jnp.float32 and len(s.shape) > 1]
    return sum(itemsize * math.prod(places[a].shard_shape(s.shape)) for a, s in wide)


def _weights(assembly: Any) -> tuple[float, float, float]:
    """Counts the weights that a device holds unsharded at once when they are gathered over `mesh.fsdp`: those of a layer, those outside
    of layers, and those outside of layers that are trained."""
    mesh = assembly.mesh
    fsdp = mesh.shape["fsdp"]
    inside = outside = trained = 0.0
    for address, shape in (assembly.shapes.params | assembly.shapes.rest).items():
        place = (assembly.places.params | assembly.places.rest)[address]
        for leaf in jax.tree.leaves(shape):
            local = math.prod(place.shard_shape(leaf.shape))
            if "layers" in address and len(leaf.shape) > 1:
                inside += local * fsdp / leaf.shape[0]
            elif len(leaf.shape) > 1:
                outside += local * fsdp
                trained += local * fsdp if address in assembly.shapes.params else 0
    return inside, outside, trained


def recomputed_bytes(assembly: Any) -> int:
    """Computes the bytes of the activations that one layer recomputes in its backward pass, on a device."""
    run = assembly.run
    if run.execution.remat == "none":
        return 0
    layers = max(1, getattr(run.model, "layers", 1))
    execution = run.execution.model_copy(update={"remat": "none", "keep": []})
    without = replace(assembly, run=run.model_copy(update={"execution": execution}))
    every = sum(size for size, _ in activations(without))
    saved_bytes = sum(size for size, _ in activations(assembly))
    return int(max(0, every - saved_bytes) / layers)
