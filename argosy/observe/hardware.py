"""The peak FLOPs, bandwidths and sizes of accelerators, by name, for plans and rooflines. This module does not import jax.

Peaks are the vendor's numbers for dense bfloat16. Memory is the amount that a program may use, where the compiler states it. Bandwidths
of interconnects are per direction and link, so a ring along an axis of a torus has twice as much. Sources: Google Cloud's pages of
each TPU version and "How to Scale Your Model" (jax-ml.github.io/scaling-book, table of TPU specs) for TPUs; NVIDIA's data sheets of
the H100 and H200 for GPUs; libtpu's error message for memory (`exceeds available HBM (15.75G)`) and its cycles for clocks.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from argosy.core.counts import plural
from argosy.core.errors import BadInput

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    platform: tpu or gpu.
    kind: jax's name for the devices.
    flops_per_s: the peak of a device in bfloat16.
    memory_bytes: the memory of a device.
    memory_bytes_per_s: the bandwidth of that memory.
    link_bytes_per_s: the bandwidth of one link to a neighbor, in one direction.
    axes: the number of axes of the torus that joins chips. With 0, all devices of a host reach each other at the same speed.
    host_chips: the number of chips of a host.
    per_name: the number in a hardware name per chip. It is 2 where names count cores: `v5p-128` has 64 chips.
    devices_per_chip: the number of jax devices per chip.
    network_bytes_per_s: the bandwidth of a device to other hosts or slices, in one direction.
    clock_hz: the clock frequency, where the compiler states cycles; else 0.
    library: the package that contains the compiler.
    topology: the compiler's name for the chip.
    largest: the most chips of a slice.
    product_share: the share of the peak that a matrix product of size 8192 in all axes reaches. By libtpu's cycles it is 0.90 on v5p,
        0.88 on v5e and 0.70 on v6e. On Hopper, 790 of 989 TFLOP/s were measured.
    """

    platform: str
    kind: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    axes: int
    host_chips: int
    per_name: int = 1
    devices_per_chip: int = 1
    network_bytes_per_s: float = 6.25e9
    clock_hz: float = 0.0
    library: str = "libtpu"
    topology: str = ""
    largest: int = 256
    product_share: float = 0.88


CHIPS: Mapping[str, Chip] = {
    "v4": Chip("tpu", "TPU v4", 137.5e12, int(15.25 * GIB), 6.14e11, 4.5e10, 3, 4, 2, 2, clock_hz=1.05e9, topology="v4", largest=4096),
    "v5e": Chip("tpu", "TPU v5 lite", 197e12, int(15.75 * GIB), 8.19e11, 4.5e10, 2, 4, clock_hz=1.5e9, topology="v5e"),
    "v5p": Chip("tpu", "TPU v5", 459e12, int(95.74 * GIB), 2.765e12, 9e10, 3, 4, 2, clock_hz=1.75e9, topology="v5p", largest=8960,
                product_share=0.9),
    "v6e": Chip("tpu", "TPU v6 lite", 918e12, int(31.25 * GIB), 1.64e12, 9e10, 2, 4, clock_hz=1.75e9, topology="v6e",
                product_share=0.7),
    "v7x": Chip("tpu", "TPU7x", 1153e12, int(94.75 * GIB), 3.69e12, 9e10, 3, 4, 2, 2, clock_hz=2.2e9, topology="tpu7x", largest=9216),
    "h100": Chip("gpu", "NVIDIA H100 80GB HBM3", 989e12, 80 * 10**9, 3.35e12, 4.5e11, 0, 8, network_bytes_per_s=5e10,
                 library="jax-cuda12-plugin", largest=1 << 20, product_share=0.8),
    "h200": Chip("gpu", "NVIDIA H200", 989e12, 141 * 10**9, 4.8e12, 4.5e11, 0, 8, network_bytes_per_s=5e10,
                 library="jax-cuda12-plugin", largest=1 << 20, product_share=0.8),
}  # fmt: skip
OTHER_NAMES = {"v5litepod": "v5e", "v5": "v5p", "v6": "v6e", "v7": "v7x", "tpu7x": "v7x", "trillium": "v6e", "ironwood": "v7x"}
NAMED = re.compile(r"([a-z]\w*?)-(\d+)$")


@dataclass(frozen=True)
class Hardware:
    """A number of chips of one kind.

    name: the name that users write, such as "v5p-128".
    chip: the kind of chip.
    shape: the number of chips along each axis of the torus; one number for GPUs.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices_per_chip

    @property
    def hosts(self) -> int:
        if self.chip.axes == 2 and self.chips <= ON_ONE_HOST:
            return 1
        return max(1, -(-self.chips // self.chip.host_chips))

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each axis of the torus is closed to a ring. A 3-D torus is closed if all its axes are multiples of 4, an axis of a
        2-D torus if it has at least 16 chips."""
        if self.chip.axes == 3:
            return tuple(all(n % 4 == 0 for n in self.shape) for _ in self.shape)
        return tuple(n >= 16 for n in self.shape)


# Slices of v5e and v6e with up to this many chips are on one host. Larger ones have hosts of 4 (cloud.google.com/tpu/docs/v5e, v6e).
ON_ONE_HOST = 8


def hardware(name: str) -> Hardware:
    """Returns the hardware that a name such as `v5p-128` or `h100-8` stands for.

    Raises:
        BadInput: there is no such kind of chip, or no slice with this number of chips.
    """
    match = NAMED.match(name.strip().lower())
    kind = OTHER_NAMES.get(match[1], match[1]) if match else ""
    listed = ", ".join(f"{kind}-{16 if chip.platform == 'tpu' else 8}" for kind, chip in CHIPS.items())
    if match is None or kind not in CHIPS:
        raise BadInput(f"device={name} is no device that is known", hint=f"this, or a kind with a number: {listed}")
    chip, count = CHIPS[kind], int(match[2])
    chips, rest = divmod(count, chip.per_name)
    if rest or chips < 1:
        problem = f"device={name}: {kind} counts {plural(chip.per_name, 'core')} a chip, so its number is even"
        raise BadInput(problem, hint=f"device={kind}-{max(1, chips) * chip.per_name} has {plural(max(1, chips), 'chip')}")
    if not chip.axes and chips > chip.host_chips and chips % chip.host_chips:
        problem = f"device={name}: a host has {chip.host_chips} of {kind}, so {chips} are on no whole number of hosts"
        best = round(chips / chip.host_chips) * chip.host_chips
        raise BadInput(problem, hint=f"device={kind}-{best}; up to {chip.host_chips} are part of one host, whatever their number")
    shape = (chips,) if not chip.axes else _torus(chips, chip.axes)
    if shape is None or chips > chip.largest:
        near = [n for n in (2**k for k in range(14)) if n <= chip.largest and _torus(n, chip.axes)]
        best = min(near, key=lambda n: abs(math.log(n / chips)))
        problem = f"device={name}: no slice of {kind} has {chips} chips"
        raise BadInput(problem, hint=f"device={kind}-{best * chip.per_name} has {best}; up to {chip.largest} chips make a slice")
    return Hardware(f"{kind}-{count}", chip, shape)


def _torus(chips: int, axes: int) -> tuple[int, ...] | None:
    """Returns the shape of a slice with this many chips whose axes are as equal as possible; None if there is no such slice.

    In small 3-D slices each axis is 1 or 2; in other 3-D slices all axes are multiples of 4. In 2-D the longer axis comes last.
    """
    if axes == 2:
        fits = [(a, chips // a) for a in (1, 2, 4, 8, 16) if chips % a == 0 and a <= chips // a <= 16]
        fits = [f for f in fits if f[1] & (f[1] - 1) == 0]
        return fits[-1] if fits else None
    if chips == 1:
        return (1, 1, 1)
    small = {2: (1, 2, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
    if chips in small:
        return small[chips]
    if chips % 64:
        return None
    cubes = chips // 64
    fits = [
        (a, b, cubes // a // b) for a in range(1, cubes + 1) if cubes % a == 0 for b in range(a, cubes // a + 1)
        if cubes // a % b == 0 and b <= cubes // a // b
    ]  # fmt: skip
    return tuple(4 * n for n in min(fits, key=lambda f: f[2] - f[0])) if fits else None
