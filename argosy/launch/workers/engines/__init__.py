"""The engines of workers: processes of this machine or of a Ray cluster, or threads of this process."""
