"""Places arrays on devices, and coordinates the processes of a run. This package works on trees of logical axes, never on modules."""
