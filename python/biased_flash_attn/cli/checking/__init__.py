"""The parts of `check`: problems, their float64 oracle, timings, processes and the report."""
