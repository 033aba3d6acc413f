"""The settings of a run: their tree, the layers that they are read from, and the table of features that do not combine."""
