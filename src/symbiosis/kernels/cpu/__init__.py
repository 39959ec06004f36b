"""Kernels for processors, each with its plain reference: C, compiled when the package is installed.

Where no compiler was at hand, or the processor's numbers are of another kind, the reference does their work.
"""
