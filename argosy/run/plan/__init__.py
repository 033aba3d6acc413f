"""Predicts the memory, the communication and the time of a run's step before it starts, on devices that may be absent.

    figures     the prediction, by the analytic model or by the compiler
    memory      the memory of a device, from shapes and shardings
    speed       the time of a step, from FLOPs and communicated weights
    compiled    the same from the compiled step: its memory, its instructions, its collectives
    nearest     small changes of settings with which a run fits into memory
"""
