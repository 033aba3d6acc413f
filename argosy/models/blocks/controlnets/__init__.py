"""Modules of ControlNets, and denoisers that they steer."""
