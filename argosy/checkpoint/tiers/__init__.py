"""Checkpoints in two tiers: persistent storage, and fast local disks of the hosts."""
