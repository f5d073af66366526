"""The ``native`` backend: structured attention in C++ for CPUs, built once on the machine that runs it."""
