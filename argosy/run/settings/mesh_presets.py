"""Meshes by name: `mesh=hsdp` is the settings in configs/meshes/hsdp.yml, `mesh=my.yml` those in a user's file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, UnknownName
from argosy.core.settings import SettingsLayer, yaml_layer
from argosy.core.settings.words import SELF


def mesh_presets(configs: Path) -> list[str]:
    return sorted(path.stem for path in (configs / "meshes").glob("*.yml"))


def with_mesh(layers: list[SettingsLayer], configs: Path) -> list[SettingsLayer]:
    """Inserts the settings of a named mesh before the layer that names it. They replace the mesh settings of earlier layers. Mesh
    settings of the same or a later layer override them. Returns the new layers.

    Raises:
        UnknownName: there is no such mesh.
    """
    out: list[SettingsLayer] = []
    for layer in layers:
        mesh_name = _mesh_name(layer)
        if mesh_name is None:
            out.append(layer)
            continue
        out = [replace(earlier, values={k: v for k, v in earlier.values.items() if k != "mesh"}) for earlier in out]
        out.append(_file(mesh_name, configs, f"set by {layer.where('mesh')}").under("mesh"))
        mesh = layer.values["mesh"]
        rest: dict[str, Any] = {k: v for k, v in mesh.items() if k != SELF} if isinstance(mesh, dict) else {}
        out.append(replace(layer, values={k: v for k, v in layer.values.items() if k != "mesh"} | ({"mesh": rest} if rest else {})))
    return out


def _mesh_name(layer: SettingsLayer) -> str | None:
    """Returns the name of the mesh in a layer; None if the layer names none."""
    mesh = layer.values.get("mesh")
    name = mesh.get(SELF) if isinstance(mesh, dict) else mesh
    return name if isinstance(name, str) else None


def _file(name: str, configs: Path, where: str) -> SettingsLayer:
    if name.endswith((".yml", ".yaml")):
        if not Path(name).is_file():
            raise BadInput(f"no such file: `{name}`", where=where, hint=f"a mesh by name: {', '.join(mesh_presets(configs))}")
        return yaml_layer(Path(name), name)
    if name not in mesh_presets(configs):
        raise UnknownName("mesh", name, mesh_presets(configs), where=where)
    return yaml_layer(configs / "meshes" / f"{name}.yml", f"meshes/{name}.yml")
