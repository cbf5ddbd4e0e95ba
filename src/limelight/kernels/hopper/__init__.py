"""Kernels for Hopper (sm_90), in Gluon. Imported by `backends/hopper.py` on first use."""
