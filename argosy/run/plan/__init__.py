"""What a run will need and do, before it: memory, traffic and time of a step on devices that may be absent.

    figures     what is predicted, and by whom: the analytic model or the compiler
    memory      memory of a device, from shapes and shardings
    speed       time of a step, from FLOPs and the weights that travel
    compiled    the same from the compiled step: its memory, its instructions, its collectives
    nearest     settings near those of a run with which it fits
"""
