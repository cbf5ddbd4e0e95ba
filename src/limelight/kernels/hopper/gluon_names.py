"""Names of Gluon that moved between Triton 3.6 and 3.9."""

from triton.experimental.gluon.language.nvidia.hopper import tma

# Global to shared memory, (descriptor, coordinates, barrier, destination).
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
