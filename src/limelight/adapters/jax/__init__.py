"""JAX arrays."""
