"""The settings of a run: their tree, the layers that they are read from, and which of them combine."""
