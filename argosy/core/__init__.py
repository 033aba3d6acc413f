"""The foundation of all other packages: settings, errors, files, formats, processes. Nothing here imports jax."""
