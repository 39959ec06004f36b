"""CPU kernels in C, each with its plain reference. They are compiled when the package is installed.

The reference runs where there was no compiler, and for other dtypes.
"""
