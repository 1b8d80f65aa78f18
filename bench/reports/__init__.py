"""What is written of measurements: results, tables and plots."""
