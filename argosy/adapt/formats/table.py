"""The number formats by name, such as int8, nf4, fp8_e4m3, mxfp4 and nvfp4. `Format` documents their fields.
"""

import jax.numpy as jnp

from argosy.adapt.formats.format import Floats, Format, Integers, Levels, Minifloats

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# The magnitudes of floats with one, three and two bits of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M3 = tuple(m / 8 if e == 0 else (1 + m / 8) * 2.0 ** (e - 1) for e in range(4) for m in range(8))
E3M2 = tuple(m / 16 if e == 0 else (1 + m / 4) * 2.0 ** (e - 3) for e in range(8) for m in range(4))

JACOB, QLORA = "Jacob et al. 2017, arXiv:1712.05877", "Dettmers et al. 2023, arXiv:2305.14314, appendix E"
FP8, OCP = "Micikevicius et al. 2022, arXiv:2209.05433", "OCP Microscaling Formats 1.0, arXiv:2310.10537"
NVIDIA = "NVIDIA 2025, arXiv:2509.25149"

FORMATS = {
    number_format.name: number_format
    for number_format in (
        Format("int8", Integers(8), source=JACOB),
        Format("int4", Integers(4), 64, source=JACOB),
        Format("int2", Integers(2), 32, source=JACOB),
        Format("nf4", Levels(4, NF4), 64, source=QLORA),
        Format("fp8_e4m3", Floats(jnp.float8_e4m3fn), source=FP8),
        Format("fp8_e5m2", Floats(jnp.float8_e5m2), source=FP8),
        Format("mxint8", Integers(8), 32, "e8m0", OCP),
        Format("mxfp8", Floats(jnp.float8_e4m3fn), 32, "e8m0", OCP),
        Format("mxfp8_e5m2", Floats(jnp.float8_e5m2), 32, "e8m0", OCP),
        Format("mxfp6_e2m3", Minifloats(6, E2M3), 32, "e8m0", OCP),
        Format("mxfp6_e3m2", Minifloats(6, E3M2), 32, "e8m0", OCP),
        Format("mxfp4", Minifloats(4, E2M1), 32, "e8m0", OCP),
        Format("nvfp4", Minifloats(4, E2M1), 16, "e4m3", NVIDIA),
    )
}
