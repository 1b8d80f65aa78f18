"""Output of measurements: results, tables and plots."""
