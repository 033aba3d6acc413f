"""Options for the compilers of devices, by platform: data, with the reason of each.

They go with each compilation and not into the environment, so an option that a compiler does not know is an error that names it, where
a flag of the environment would end the process.
"""

from typing import Any

from argosy.core.progress import Say

# Gathers run beside products instead of before them, and over several of their steps. For Llama 2 70B over 64 chips of a v5p
# (docs/measured.md) no gather is exposed then. MaxText sets the same for v5p and v6e.
ASYNC_COLLECTIVES = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}
OPTIONS: dict[str, dict[str, str]] = {"tpu": ASYNC_COLLECTIVES}


def compile_lowered(lowered: Any, options: dict[str, str], say: Say = lambda _: None) -> Any:
    """Compiles a lowered program with options; without them, and saying so, where the compiler does not know one."""
    if not options:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=options)
    except Exception as error:
        if "No such compile option" not in str(error):
            raise
        say(f"compiled without options: {' '.join(str(error).split())[:200]}")
        return lowered.compile()
