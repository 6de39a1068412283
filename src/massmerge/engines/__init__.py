"""Where work runs: a job's units, in threads of this process or on the machines of a Ray cluster."""
