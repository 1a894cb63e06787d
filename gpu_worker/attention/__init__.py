"""Attention over a paged cache: what it must know of a step, and the backends that compute it."""
