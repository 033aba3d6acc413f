"""Measures what the steps of a run spend their time on: a capture by XLA's profiler, and tables by layer and by kind of operation.

    capture    a capture of some steps, in files that XProf opens
    trace      the operations of a capture on one device, each with its share of the time
    table      these seconds by layer, kind and operation, with FLOPs and bytes from the compiled program
    text       the tables as text
"""
