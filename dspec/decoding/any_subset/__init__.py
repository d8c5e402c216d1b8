"""Decoding of any-subset models: sequential, speculative (ASSD), and a biased sampler to compare them with.

A *position* is an index in the text. A *place* is an index in the order of generation, in which the prompt's tokens
come first; the token at place i is at position positions[i] of the text. A *slot* is an index among the drafts of a
pass. A *position query* is an input without content, the mask token's embedding at the position of a place: its output
is the distribution of that place's token, given the tokens at all places before the query's *limit*. The mask token is
never generated: its logit is -inf.
"""
