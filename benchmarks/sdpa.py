"""The baseline on a GPU: the fastest of the kernels behind PyTorch's ``scaled_dot_product_attention``, found
by trying each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import Clock

# Without the dense one, which would keep T x T scores.
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
TRIALS = 3


def fastest_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    backward: bool,
    clock: Clock,
    backends: Sequence[SDPBackend] = BACKENDS,
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]:
    """The fastest kernel for these tensors, as a function of q, k and v, and its name.

    Args:
        q, k, v: as ``scaled_dot_product_attention`` takes them.
        is_causal: likewise.
        backward: whether the gradients are timed too.
        clock: of their device.
        backends: what is tried; one that cannot run is left out.

    Raises:
        RuntimeError: none can run.
    """
    times: dict[SDPBackend, float] = {}
    for backend in backends:
        attend = _with(backend, is_causal)

        def call(attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend) -> object:
            with torch.set_grad_enabled(backward):
                out = attend(q, k, v)
                return torch.autograd.grad(out, (q, k, v), out) if backward else out

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they say why a kernel cannot run
            try:
                clock.time_ms(call, 1)
                times[backend] = min(clock.time_ms(call, 1) for _ in range(TRIALS))
            except RuntimeError:
                continue
    if not times:
        raise RuntimeError(f"none of {[backend.name for backend in backends]} can run here")
    best = min(times, key=lambda backend: times[backend])
    return _with(best, is_causal), f"SDPA, {best.name}"


def _with(backend: SDPBackend, is_causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return attend
