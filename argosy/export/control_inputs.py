"""Names of what a bundle with ControlNets takes for them, by whoever writes bundles and whoever calls them (`export.control`)."""

from argosy.export.manifest import BundleSignature

IMAGE, FILE, SCALE, MODE = "control_image", "control_image_file", "control_scale", "control_mode"


def control_suffixes(count: int) -> list[str]:
    """The ends of the names of so many ControlNets' inputs, in their order."""
    return [f"_{i + 1}" if i else "" for i in range(count)]


def suffixes_in(signature: BundleSignature) -> list[str]:
    """The ends of the names of a signature's ControlNets; empty: it has none."""
    names = {spec.name for spec in signature.inputs}
    return [end for end in control_suffixes(len(names)) if f"{IMAGE}{end}" in names]
