"""Runs one server over several processes, for bundles whose weights are split over the devices of all processes.

The leader, process 0, has the HTTP and gRPC servers, the queues and the batches. The other processes are followers. They open, compile
and close the same bundles, and call the program of each batch with the same inputs in the leader's order, because programs over several
processes wait for each other.
"""
