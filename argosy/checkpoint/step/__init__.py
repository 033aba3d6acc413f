"""The files of one checkpoint: writes, reads and locks them."""
