"""Decoding of diffusion LMs: fixed steps, confidence threshold, D2F and LoPA are settings of one decoder."""
