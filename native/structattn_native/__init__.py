"""The compiled C++ code of structattn, which finds it here. There is nothing to import."""
