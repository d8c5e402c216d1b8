"""The search for the fastest configuration of Jacobi decoding on the device at hand."""
