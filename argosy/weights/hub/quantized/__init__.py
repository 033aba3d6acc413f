"""The Hub's quantized layouts. One file per layout says how codes, scales and zero points of a module are packed."""
