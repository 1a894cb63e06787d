"""Functions on tensors. Knows nothing of requests.

This file stays free of imports: a library of the same name exists, and transformers executes
whatever package called `kernels` it finds.
"""
