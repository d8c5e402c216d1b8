"""Attention masks, each written once as a predicate over logical positions."""
