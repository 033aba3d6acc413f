"""The devices that a run is built for. They may be those of this machine, or absent ones.

    Target.here()                      the devices of this process
    Target.described("v5p-128")        absent devices of which only the numbers are known: shapes and shardings can be computed
    Target.described(...).compiled()   absent devices that an installed compiler describes: programs can be compiled

No arrays are stored on absent devices.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from argosy.core.command import install_package
from argosy.core.errors import BadInput, Unsupported
from argosy.observe.environment import memory_bytes
from argosy.observe.hardware import Chip, Hardware, hardware
from argosy.parallel.mesh import ORDER

if TYPE_CHECKING:
    from argosy.parallel.mesh import MeshSettings

THIS = "this"


@dataclass(frozen=True)
class Target:
    """The devices that a run is built for.

    name: "this", or a name such as "v5p-128".
    platform: cpu, gpu or tpu.
    kind: the vendor's name of the devices.
    count: the number of devices.
    processes: the number of processes. Absent devices have one process per host.
    memory_bytes: the memory of a device, or of the machine if its devices share that. None if unknown.
    host_memory_bytes: the memory of a host, None if unknown.
    devices: the jax devices, () if only numbers are known.
    hardware: the hardware that the name stands for, None for this machine.
    """

    name: str
    platform: str
    kind: str
    count: int
    processes: int
    memory_bytes: int | None
    host_memory_bytes: int | None = None
    devices: tuple[Any, ...] = ()
    hardware: Hardware | None = None

    @classmethod
    def here(cls, devices: Sequence[Any] | None = None) -> "Target":
        """Returns the target of this process's devices, or of some of them.

        Raises:
            BadInput: the requested platform does not exist on this machine.
        """
        platform = backend()
        devices = tuple(jax.devices() if devices is None else devices)
        host = memory_bytes()[0]
        memory = host if platform == "cpu" else (devices[0].memory_stats() or {}).get("bytes_limit")
        return cls(THIS, platform, devices[0].device_kind, len(devices), jax.process_count(), memory, host, devices)

    @classmethod
    def described(cls, name: str) -> "Target":
        """Returns the target that a name such as `this`, `v5p-128` or `h100-8` stands for.

        Raises:
            BadInput: there is no such kind or number of devices.
        """
        if name == THIS:
            return cls.here()
        spec = hardware(name)
        chip = spec.chip
        return cls(spec.name, chip.platform, chip.kind, spec.devices, spec.hosts, chip.memory_bytes, hardware=spec)

    @property
    def is_here(self) -> bool:
        """Whether these are devices of this machine, on which programs run."""
        return self.name == THIS

    @property
    def shares_memory(self) -> bool:
        """Whether the devices compute in the machine's own memory."""
        return self.platform == "cpu"

    @property
    def chip(self) -> Chip | None:
        return None if self.hardware is None else self.hardware.chip

    def mesh(self, settings: "MeshSettings") -> Any:
        """Builds the mesh over these devices. It is abstract, and holds no arrays, if only their numbers are known.

        Raises:
            BadInput: the sizes do not multiply to the number of devices.
        """
        if self.devices:
            return settings.build(self.devices)
        inside, between = settings.resolve(self.count, 1, False)
        sizes = tuple(inside[axis] * between[axis] for axis in ORDER)
        device = AbstractDevice(self.kind, num_cores=None, platform={"gpu": "cuda"}.get(self.platform, self.platform))
        return AbstractMesh(sizes, ORDER, axis_types=(AxisType.Auto,) * len(ORDER), abstract_device=device)

    def missing_compiler(self) -> str | None:
        """Returns the package that contains the compiler for these devices, if it has to be installed; else None."""
        chip = self.chip
        if self.devices or chip is None:
            return None
        module = {"libtpu": "libtpu", "jax-cuda12-plugin": "jax_plugins.xla_cuda12"}[chip.library]
        try:
            return None if find_spec(module) else chip.library
        except ModuleNotFoundError:
            return chip.library

    def compiled(self) -> "Target":
        """Returns the same target with the devices that its compiler describes. Programs can be compiled for them although they are
        absent.

        Raises:
            Unsupported: the compiler is not installed, or cannot describe these devices.
        """
        if self.devices or self.hardware is None:
            return self
        if missing := self.missing_compiler():
            raise Unsupported(f"the compiler for {self.name} is not installed", hint=install_package(missing))
        if self.platform != "tpu":
            raise Unsupported(f"programs for {self.name} are compiled where there is one", hint="compile=false gives the estimate")
        from jax.experimental import topologies

        quiet = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}
        for key, value in quiet.items():
            os.environ.setdefault(key, value)
        chip, shape = self.hardware.chip, self.hardware.shape
        options: dict[str, Any] = {}
        if chip.axes == 3 and all(self.hardware.wraps):
            # Without these, XLA sees no torus, and all-gathers become all-reduces of padded arrays.
            options = {"wrap": self.hardware.wraps, "chips_per_host_bounds": (2, 2, 1)}
        elif self.hardware.hosts == 1 and self.hardware.chips != chip.host_chips:
            options = {"chips_per_host_bounds": (*shape, 1)[:3] if chip.axes == 2 else shape}
        name = f"{chip.topology}:{'x'.join(map(str, shape))}"
        try:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
        except Exception as error:
            reason = (str(error).splitlines() or ["no reason given"])[0][:200]
            raise Unsupported(f"the compiler describes no {self.name} ({name}): {reason}", hint="compile=false") from None
        processes = len({device.process_index for device in devices})
        return replace(self, devices=tuple(devices), count=len(devices), kind=devices[0].device_kind, processes=processes)


def backend() -> str:
    """Returns the platform that jax computes on.

    Raises:
        BadInput: the requested platform does not exist on this machine.
    """
    try:
        return jax.default_backend()
    except RuntimeError as error:
        setting = f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" if os.environ.get("JAX_PLATFORMS") else None
        reason = (str(error).splitlines() or ["no reason given"])[0][:200]
        raise BadInput(
            f"jax has no such device: {reason}", where=setting, hint="`argosy doctor` lists the devices there are"
        ) from None
