"""C++ for the CPU, compiled on the machine that runs it. See `library`."""
