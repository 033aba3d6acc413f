"""Which implementation multiplies matrices in a run's programs (`ops.matmul`)."""

from jax.sharding import Mesh

from argosy.core.errors import Unsupported
from argosy.jobs.run import Run
from argosy.ops.native import library
from argosy.train.step import Precision

# Parameters below which a run builds no kernels, which takes ten seconds once: its products are too small for them.
SMALLEST = 1_000_000


def products_of(run: Run, precision: Precision, mesh: Mesh) -> str:
    """What `execution.products` names; otherwise `amx` in float32 on one CPU device that has it, and `xla` elsewhere.

    Raises:
        Unsupported: the named one is for another precision, or cannot run on these devices.
    """
    named = run.execution.products
    if named == "xla" or (named is None and run.model.parameters() < SMALLEST):
        return "xla"
    reason = _why_not(precision, mesh)
    if named is not None and reason:
        raise Unsupported(
            f"execution.products={named} {reason}", hint="without it, the fastest that runs here is taken"
        )
    return named or ("xla" if reason else "amx")


def _why_not(precision: Precision, mesh: Mesh) -> str:
    """Why matrix units cannot multiply for this run; "" if they can. Builds the kernels where nothing else is in the way."""
    if mesh.devices.flat[0].platform != "cpu":
        return "runs on CPUs"
    if mesh.size > 1:
        return f"is for one device, and this run has {mesh.size}"
    if precision != "float32":
        return f"multiplies float32, and this run computes in {precision}"
    if why := library.load():
        return f"needs the kernels of CPUs: {why}"
    return "" if library.has_amx() else "needs matrix units (AMX), which this processor does not have"
