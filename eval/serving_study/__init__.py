"""Whether calibrating the confidence head pays for scheduling, simulated on recorded traces."""
