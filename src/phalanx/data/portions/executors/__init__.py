"""Executors of a preparation: in this process, in processes of this machine, and on clusters of Dask, Ray or Spark."""
