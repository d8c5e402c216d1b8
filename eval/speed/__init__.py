"""The cost of rounds and forward passes on this device."""
