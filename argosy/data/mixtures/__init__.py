"""Mixtures: several sources of data as one."""
