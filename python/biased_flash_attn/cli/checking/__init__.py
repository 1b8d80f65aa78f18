"""What `check` is made of: problems, their float64 oracle, timings, processes and the report."""
