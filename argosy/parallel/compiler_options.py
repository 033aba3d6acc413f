"""The compiler options of each platform, with the reason of each option.

They are passed with each compilation and not through the environment. An option that a compiler does not know is then an error that
names it, whereas an unknown flag in the environment would end the process.
"""

from typing import Any

from argosy.core.progress import Say

# All-gathers overlap with matrix products, over several steps of them. For Llama 2 70B on 64 chips of a v5p no all-gather is exposed
# then (docs/measured.md). MaxText sets the same options for v5p and v6e.
ASYNC_COLLECTIVES = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}
OPTIONS: dict[str, dict[str, str]] = {"tpu": ASYNC_COLLECTIVES}


def compile_lowered(lowered: Any, options: dict[str, str], say: Say = lambda _: None) -> Any:
    """Compiles a lowered program with options. If the compiler does not know one of them, compiles without options and calls `say` with
    a message."""
    if not options:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=options)
    except Exception as error:
        if "No such compile option" not in str(error):
            raise
        say(f"compiled without options: {' '.join(str(error).split())[:200]}")
        return lowered.compile()
