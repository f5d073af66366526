"""Importing this makes the process compile and use a library for ``avx512_bf16`` whose products use the
instructions of AMX, emulated. It is also a plugin: ``pytest -p emulated_amx``.
"""

from structattn.ops.native import compiler

compiler.INSTRUCTIONS["avx512_bf16"] += ("-DSTRUCTATTN_EMULATE_AMX",)
