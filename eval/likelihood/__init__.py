"""Log-likelihoods of given answers: `python -m eval.score`."""
