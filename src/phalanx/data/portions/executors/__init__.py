"""Executors of a preparation: in this process, in processes of this machine, and on a cluster of Dask."""
