"""unshard against the speed of `cp` and against its peers: one command, one table. See `__main__`."""
