"""What rounds and forward passes cost on the device at hand."""
