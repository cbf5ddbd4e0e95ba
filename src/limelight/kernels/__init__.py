"""What runs: device code and loops over tiles. A backend imports its kernels on first use."""
