"""Chooses the implementation of matrix products with weights (`ops.matmul`). The choice is stored with the run, because implementations
agree only to rounding.
"""

from typing import NamedTuple

from argosy.core.errors import Unsupported
from argosy.ops.native import library
from argosy.run.settings.run import Run

# Parameters below which a run builds no kernels, which takes ten seconds once: its products are too small for them.
SMALLEST = 1_000_000


class ProductChoice(NamedTuple):
    """The implementation of matrix products with weights.

    name: the name of the implementation in `ops.matmul.MATMUL`.
    reason: the reason why it differs from the stored choice; "" if it does not differ.
    """

    name: str
    reason: str


def decided_products(run: Run, precision: str, devices: int, platform: str) -> str:
    """Returns the setting `execution.products` if it is set. The default is `amx` for float32 on a single CPU device that has it, and
    `xla` elsewhere."""
    if run.execution.products is not None:
        return run.execution.products
    if run.objective.needs.forward or run.model.parameters() < SMALLEST or _why_not(precision, devices, platform):
        return "xla"
    return "amx"


def products_of(run: Run, products: str, precision: str, platform: str, devices: int) -> ProductChoice:
    """Returns the implementation that can run here.

    Args:
        products: the stored choice.

    Raises:
        Unsupported: the settings name one that cannot run here.
    """
    reason = "" if products == "xla" else _why_not(precision, devices, platform)
    if reason and run.execution.products is not None:
        raise Unsupported(f"execution.products={products} {reason}", hint="without it, the fastest that runs here is taken")
    return ProductChoice("xla", reason) if reason else ProductChoice(products, "")


def _why_not(precision: str, devices: int, platform: str) -> str:
    """Returns the reason why a run cannot use the matrix units of the CPU; "" if it can. Compiles the kernels to find out, if there is
    no other obstacle."""
    if platform != "cpu":
        return "runs on CPUs"
    if devices > 1:
        return f"is for one device, and this run has {devices}"
    if precision != "float32":
        return f"multiplies float32, and this run computes in {precision}"
    if why := library.load():
        return f"needs the kernels of CPUs: {why}"
    return "" if library.has_amx() else "needs matrix units (AMX), which this processor does not have"
