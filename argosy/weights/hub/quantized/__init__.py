"""The Hub's quantized layouts: how each packs the codes, scales and zero points of a module, a file each."""
