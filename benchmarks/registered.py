"""Imports every benchmark, so that each is in the registry; a new one is imported here too."""

import benchmarks.attention
import benchmarks.call
import benchmarks.context_parallel
import benchmarks.decode
import benchmarks.linear
import benchmarks.llama
import benchmarks.masks
import benchmarks.model
import benchmarks.serve
import benchmarks.step  # noqa: F401
from benchmarks.registry import BENCHMARKS as BENCHMARKS
