"""Modules of ControlNets, and of denoisers with ControlNets."""
