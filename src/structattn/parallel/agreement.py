"""Whether all processes make the same call: asked before any key travels, since processes that differ would
wait for each other, or compute nonsense.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from structattn.checks import shortened
from structattn.errors import ConfigError, StructAttnError
from structattn.parallel.processes import Processes

NUMBERS = 4  # int64 that each process sends to each other one in every call


def agreed_lengths(
    processes: Processes,
    device: torch.device,
    length: int,
    call: Mapping[str, object],
    error: StructAttnError | None,
    *,
    rule: str = "all processes must make the same call, each with its own tokens",
) -> tuple[int, ...]:
    """The tokens that each process holds, if all of them make the same call.

    Args:
        device: on which the collective runs.
        length: the tokens of this process.
        call: what must be the same everywhere, by name; what JSON can write.
        error: what is wrong with the call of this process, if anything is.
        rule: what the error of different calls says before it names the difference.

    Raises:
        StructAttnError: ``error``, in this process.
        ConfigError: the call of another process is wrong, or is another call.

    Cost: one gather of ``NUMBERS`` int64, which a GPU is waited for; where there is an error, a second one of
        its text.
    """
    text = json.dumps({"error": f"{type(error).__name__}: {error}"} if error is not None else {"call": call}).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "big", signed=True)
    row = torch.tensor([error is None, length, digest, len(text)], dtype=torch.int64, device=device)
    rows = processes.gathered(row).tolist()
    is_right, lengths, digests, sizes = zip(*rows, strict=True)
    if all(is_right) and len(set(digests)) == 1:
        return tuple(lengths)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = processes.gathered(padded.to(device)).cpu()
    answers = [json.loads(bytes(row[:size].tolist())) for row, size in zip(texts, sizes, strict=True)]
    if error is not None:
        raise error
    for number, answer in enumerate(answers):
        if "error" in answer:
            raise ConfigError(
                f"nothing was computed, since the call of process {number} of {processes.count} (counted from 0) is "
                f"wrong: {answer['error']}"
            )
    raise ConfigError(f"{rule}: {_difference([x['call'] for x in answers])}")


def _difference(calls: list[dict[str, object]]) -> str:
    """The first thing that differs, and the processes in which it does."""
    for name in calls[0]:
        processes: dict[str, list[int]] = {}
        for number, call in enumerate(calls):
            processes.setdefault(shortened(json.dumps(call.get(name)), 300), []).append(number)
        if len(processes) > 1:
            values = "; ".join(f"{value} in process {', '.join(map(str, where))}" for value, where in processes.items())
            return f"{name} is {values} (counted from 0)"
    raise AssertionError("calls of different digests are equal")
