"""Registered benchmarks, their driver (``python -m benchmarks.run``) and dated results; not part of the
package.
"""
