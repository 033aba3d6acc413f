"""One server over several processes, for bundles whose weights are split over the devices of all of them.

The leader, process 0, has the front door, queues and batches. The others follow: they open, compile and close the same bundles, and
call each batch's program with the same inputs, in the leader's order, since programs over several processes wait for one another.
"""
