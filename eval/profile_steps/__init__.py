"""What a step of a drafter and its target costs on this device, as a step table."""
