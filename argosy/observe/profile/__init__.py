"""What the steps of a run spend their time on: a capture by XLA's profiler, and tables by layer, by kind of operation and by roofline.

    capture    a window of steps, in files that XProf opens
    trace      the operations of a capture on one device, each with the seconds that belong to it
    table      those seconds by layer, kind and operation, with FLOPs and bytes from the compiled program
    text       the tables in a terminal
"""
