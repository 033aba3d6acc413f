"""Where the processes of a group are: on this machine, in a Ray cluster, or in this process."""
