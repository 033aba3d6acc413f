"""The names of the inputs for ControlNets, for code that writes bundles (`export.control`) and code that calls them."""

from argosy.export.manifest import BundleSignature

IMAGE, FILE, SCALE, MODE = "control_image", "control_image_file", "control_scale", "control_mode"


def control_suffixes(count: int) -> list[str]:
    """Returns the suffixes of the input names of this many ControlNets, in their order."""
    return [f"_{i + 1}" if i else "" for i in range(count)]


def suffixes_in(signature: BundleSignature) -> list[str]:
    """The ends of the names of a signature's ControlNets; empty: it has none."""
    names = {spec.name for spec in signature.inputs}
    return [end for end in control_suffixes(len(names)) if f"{IMAGE}{end}" in names]
