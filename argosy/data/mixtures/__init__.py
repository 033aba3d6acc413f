"""Mixtures: several sources of data that are read as one."""
