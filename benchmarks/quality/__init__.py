"""Accuracy per byte; run from `benchmarks`: `python -m quality.ablations --quick`."""
