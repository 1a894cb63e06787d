"""HTTP in, text out. Knows no block and no batch."""
