"""Benchmarks: named problems, peers measured in the same run, results as JSON."""
