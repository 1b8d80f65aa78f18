"""Measurements and estimates of speed and memory; not part of the package."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
