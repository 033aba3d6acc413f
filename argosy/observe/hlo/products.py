"""Counts the FLOPs of the products of an HLO module from the shapes of its instructions: 2 for each multiply-add.

TPUs compute a matrix product as a convolution, often one over padding whose windows pick the diagonal of a batch. Positions in the
padding do not count, as in XLA's own analysis. Kernels are opaque. Kernels whose names and shapes tell what they compute are counted in
full, even if they skip blocks of a mask. `uncounted_kernels` names the others.
"""

import json
import math
import re
from collections.abc import Callable

from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.text import Computation, Instruction, dimensions, elements, tuple_elements

WINDOW = re.compile(r"window=\{([^}]*)\}")
LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Parts of the targets of custom calls that may compute products.
KERNELS = ("tpu_custom_call", "triton", "mosaic_gpu", "cudnn", "cublas", "onednn", "ynn")


def product_flops(program: HloModule) -> int:
    """Returns the FLOPs of all products. The body of a loop counts as often as it runs."""
    return sum(times * sum(flops(c, i) or 0 for i in c.instructions) for c, times in program.running())


def uncounted_kernels(program: HloModule) -> list[str]:
    """Returns the names of the kernels whose FLOPs are unknown."""
    names = [
        kernel_name(i)
        for c, _ in program.running()
        for i in c.instructions
        if i.opcode == "custom-call" and any(k in call_target(i).lower() for k in KERNELS) and flops(c, i) is None
    ]
    return sorted(set(names))


def flops(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the FLOPs of one execution of an instruction: 0 if it is not a product, None for a kernel whose products are unknown."""
    counter = {"dot": _dot, "convolution": _convolution, "ragged-dot": _ragged, "custom-call": _custom}.get(instruction.opcode)
    return 0 if counter is None else counter(computation, instruction)


def call_target(instruction: Instruction) -> str:
    """Returns the target of a custom call; "" for other instructions."""
    match = TARGET.search(instruction.attributes)
    return match[1] if match else ""


def kernel_name(instruction: Instruction) -> str:
    """Returns the name of a kernel: for TPUs that of the function that defines it, else the target of the custom call."""
    called = call_target(instruction)
    return re.sub(r"[.\d]+$", "", instruction.name) if called == "tpu_custom_call" else called


def _operand(computation: Computation, instruction: Instruction, number: int) -> list[int]:
    operand = computation.by_name.get(instruction.operands[number]) if number < len(instruction.operands) else None
    return dimensions(operand.type) if operand is not None else []


def _dot(computation: Computation, instruction: Instruction) -> int:
    left = _operand(computation, instruction, 0)
    return 2 * elements(instruction.type) * math.prod(left[i] for i in instruction.numbers("lhs_contracting_dims"))


def _ragged(computation: Computation, instruction: Instruction) -> int:
    """Counts the product of each row with the matrix of its group."""
    left = _operand(computation, instruction, 0)
    out, contracted = dimensions(instruction.type), instruction.numbers("lhs_contracting_dims")
    ragged = instruction.numbers("lhs_ragged_dims")
    # The gradient of the weights sums over the rows, and its result has an axis of groups.
    rows = out[1:] if set(ragged) <= set(contracted) and ragged else out
    return 2 * math.prod(rows) * math.prod(left[i] for i in contracted)


def _convolution(computation: Computation, instruction: Instruction) -> int:
    labels = LABELS.search(instruction.attributes)
    left, right, out = (_operand(computation, instruction, 0), _operand(computation, instruction, 1), dimensions(instruction.type))
    if labels is None or not right:
        return 0
    lhs, rhs, result = labels[1], labels[2], labels[3]
    batches = int(instruction.attribute("batch_group_count") or 1)
    # With several groups of features, the size of one group.
    inner = right[rhs.index("i")]
    outer = out[result.index("f")]
    rows = left[lhs.index("b")] // batches
    taps = _taps(instruction, lhs, left, result, out)
    return 2 * inner * outer * rows * taps


def _taps(instruction: Instruction, lhs: str, left: list[int], result: str, out: list[int]) -> int:
    """Counts the pairs of output position and kernel position that meet an input, over all spatial axes."""
    match = WINDOW.search(instruction.attributes)
    fields = dict(part.split("=", 1) for part in match[1].split()) if match else {}
    spatial = sorted(c for c in lhs if c.isdigit())
    if not spatial:
        return 1

    def column(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * len(spatial)

    sizes, strides, pads = column("size", "1"), column("stride", "1"), column("pad", "0_0")
    bases, dilations = column("lhs_dilate", "1"), column("rhs_dilate", "1")
    total = 1
    for axis, digit in enumerate(spatial):
        n, m = left[lhs.index(digit)], out[result.index(digit)]
        low = int(pads[axis].split("_")[0])
        total *= _meetings(n, m, int(sizes[axis]), int(strides[axis]), low, int(bases[axis]), int(dilations[axis]))
    return total


def _meetings(n: int, m: int, kernel: int, stride: int, low: int, base: int, dilation: int) -> int:
    """Counts the pairs (output o, kernel k) for which o * stride + k * dilation - low is the position of an input.

    Args:
        n, m, kernel: the numbers of inputs, of outputs and of kernel positions along the axis.
        base: the distance between neighboring inputs.
    """
    total = 0
    end = (n - 1) * base + 1
    for k in range(kernel):
        offset = k * dilation - low
        if base == 1:
            first, last = -(-max(-offset, 0) // stride), (end - 1 - offset) // stride
            total += max(0, min(last, m - 1) - first + 1)
        else:
            total += sum(1 for o in range(m) if 0 <= (place := o * stride + offset) < end and place % base == 0)
    return total


def _custom(computation: Computation, instruction: Instruction) -> int | None:
    called = call_target(instruction)
    if called.startswith("__cublas$"):
        return _cublas(computation, instruction)
    if called.startswith("__cudnn$fmha"):
        return _attention(computation, instruction, 5 if "Backward" in called else 2)
    if called == "tpu_custom_call":
        for pattern, count in ATTENTION:
            if pattern.search(instruction.name):
                return _attention(computation, instruction, count)
        for pattern, counter in GROUPED:
            if pattern.search(instruction.name):
                return counter(computation, instruction)
        return None
    return None if any(k in called.lower() for k in KERNELS) else 0


def _cublas(computation: Computation, instruction: Instruction) -> int | None:
    match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
    if match is None:
        return None
    left = _operand(computation, instruction, 0)
    contracted = json.loads(f"[{match[1]}]")
    return 2 * elements(tuple_elements(instruction.type)[0]) * math.prod(left[int(i)] for i in contracted)


def _floats(computation: Computation, instruction: Instruction, rank: int) -> list[list[int]]:
    """Returns the shapes of the operands that are floats and have at least this rank."""
    operands = [computation.by_name.get(name) for name in instruction.operands]
    shapes = [dimensions(i.type) for i in operands if i is not None and re.match(r"(bf|f)\d", i.type)]
    return [shape for shape in shapes if len(shape) >= rank]


def _attention(computation: Computation, instruction: Instruction, products: int) -> int | None:
    """Counts `products` products of the size of queries [... H T D] times keys [... K S D], including masked positions. In cuDNN, heads
    come after times."""
    arrays = _floats(computation, instruction, 3)
    if len(arrays) < 2:
        return None
    queries, keys = arrays[0], arrays[1]
    times = keys[-3] if call_target(instruction).startswith("__cudnn") else keys[-2]
    return 2 * products * math.prod(queries) * times


def _rows_by_groups(computation: Computation, instruction: Instruction) -> int | None:
    """Counts the product of rows [M K] with the matrices [G K N] of their groups."""
    arrays = _floats(computation, instruction, 2)
    return 2 * math.prod(arrays[0]) * dimensions(tuple_elements(instruction.type)[0])[-1] if arrays else None


def _gradient_of_groups(computation: Computation, instruction: Instruction) -> int | None:
    """Counts the product of [K M] and [M N], summed within each group: [G K N]."""
    arrays, out = _floats(computation, instruction, 2), dimensions(tuple_elements(instruction.type)[0])
    if len(arrays) < 2 or len(out) < 3:
        return None
    shared = set(arrays[0]) & set(arrays[1])
    rows = max(shared, default=0)
    return 2 * rows * out[-1] * out[-2] if rows else None


# The number of products of each attention kernel: gradient of queries; gradients of keys and values; all gradients; forward pass.
ATTENTION = (
    (re.compile(r"_dq(_|\b)"), 3),
    (re.compile(r"_dkv(_|\b)"), 4),
    (re.compile(r"(splash|flash).*(bwd|backward)"), 5),
    (re.compile(r"splash|flash"), 2),
)
Count = Callable[[Computation, Instruction], int | None]
GROUPED: tuple[tuple[re.Pattern[str], Count], ...] = (
    (re.compile(r"(^|_)tgmm(_|\b)"), _gradient_of_groups),
    (re.compile(r"(^|_)gmm(_|\b)|^ragged-dot-none"), _rows_by_groups),
)
