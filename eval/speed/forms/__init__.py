"""dspec's optimised forms against plain ones: `python -m eval.speed.forms`."""
