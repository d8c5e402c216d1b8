"""dspec: train and compare the methods that get several tokens out of one forward pass of a language model."""

__version__ = "0.1.0"
