"""Calls in bfloat16 whose products fill tile registers of AMX, with sizes that do not fit these: results of
the C++ code, each held to the definition in float64. As a program: ``amx_calls.py FILE [emulated]``.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

import structattn as sa
from structattn.testing.tolerances import assert_close

LENGTHS = (1, 15, 17, 63, 65, 200)


def layouts(dim: int) -> dict[str, sa.LevelLayout | None]:
    half, quarter = dim // 2, dim // 4
    odd = (half + 1, quarter - 1, dim - half - quarter)
    return {
        "one level": None,
        "two levels": sa.LevelLayout((dim - quarter, quarter), (256, 64)),
        "equal levels": sa.LevelLayout.halving((quarter,) * 4, 256),
        "odd ranks": sa.LevelLayout(odd, (256, 64, 8), value_ranks=odd[::-1]),
        "values": sa.LevelLayout((half, quarter, quarter), (256, 32, 16), value_ranks=(half, quarter, quarter)),
        "sliding": sa.LevelLayout.sliding((half, quarter, quarter), (None, 100, 20)),
        "factors": sa.LevelLayout((half, quarter, quarter), (256, 64, 16), scaling="paper"),
        "sink tokens": sa.LevelLayout((half, half), (256, 16), sink_tokens=5),
    }


def options(number: int, batch: int, heads: int, length: int) -> dict:
    """One of many sets of options, each valid for every layout."""
    rows = torch.arange(length)
    choices: list[dict] = [
        {},
        {"is_causal": False},
        {"window": 33},
        {"attn_mask": (rows[:, None] * 7 + rows * 3) % 5 != 0},
        {"softcap": 5.0, "alibi_slopes": torch.linspace(0.01, 0.2, heads)},
        {"left_padding": torch.arange(batch) * (length // 3)},
        {"attn_bias": torch.linspace(-1, 1, length)},
        {"sinks": torch.linspace(-1, 1, heads)},
        {"is_causal": False, "window": 50},
    ]
    return choices[number % len(choices)]


def check(found: Tensor, expected: Tensor) -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02 * (1 + largest))


def attention(
    layout: sa.LevelLayout | None, sizes: tuple[int, int, int, int, int], options: dict
) -> tuple[Tensor, ...]:
    """(out, log-sum-exp, gradients) of sizes (B, H, G, T, D)."""
    batch, heads, groups, length, dim = sizes
    leaves = [torch.randn(batch, n, length, dim).bfloat16().requires_grad_() for n in (heads, groups, groups)]
    cotangent = torch.randn(batch, heads, length, dim).bfloat16()
    results = []
    for name, x in (("native", leaves), ("reference", [x.detach().double().requires_grad_() for x in leaves])):
        out, lse = sa.structured_attention(*x, layout, backend=name, return_lse=True, **options)
        gradients = torch.autograd.grad(out, x, cotangent.to(out.dtype))
        results.append([y.detach() for y in (out, lse, *gradients)])
    found, expected = results
    for a, b in zip(found, expected, strict=True):
        seen = b.isfinite()
        assert torch.equal(seen, a.isfinite())
        check(a[seen], b[seen])
    assert_close(found[0], expected[0])
    return tuple(found)


def decoding(layout: sa.LevelLayout | None, dim: int) -> tuple[Tensor]:
    """A prompt, a chunk and steps of a cache."""
    q, k, v = (torch.randn(2, n, 100, dim).bfloat16() for n in (4, 2, 2))
    cache = sa.LevelCache(layout)
    ends = [0, 40, 81, *range(82, 101)]
    found = torch.cat(
        [cache.attend(*(x[:, :, a:b] for x in (q, k, v))) for a, b in zip(ends, ends[1:], strict=False)], 2
    )
    assert_close(found, sa.structured_attention(*(x.double() for x in (q, k, v)), layout, backend="reference"))
    return (found,)


def calls() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    number = 0
    for dim in (8, 24, 64, 80, 128):
        for name, layout in layouts(dim).items():
            for length in LENGTHS:
                number += 1
                torch.manual_seed(number)
                torch.set_num_threads(1 + number % 3)
                sizes = ((1, 2, 2), (2, 2, 1), (1, 4, 2))[number % 3]
                chosen = options(number, *sizes[:2], length)
                yield f"{name}, {dim=}, {length=}, {sorted(chosen)}", attention(layout, (*sizes, length, dim), chosen)
            torch.manual_seed(number)
            packed = {"cu_seqlens": torch.tensor([0, 17, 80, 80, 200])}
            yield f"{name}, {dim=}, packed", attention(layout, (1, 4, 2, 200, dim), packed)
            yield f"{name}, {dim=}, decoding", decoding(layout, dim)


def what_is_no_number_stays_where_it_is() -> None:
    """A query that is no number makes its own output and gradient so, and those of the keys that it sees."""
    q, k, v = (torch.randn(1, 1, 130, 64).bfloat16() for _ in range(3))
    q[:, :, 70] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = sa.structured_attention(*leaves, backend="native")
    has_none = torch.arange(130) == 70
    assert torch.equal(out.isnan().all(-1)[0, 0], has_none)
    assert torch.equal(out.isnan().any(-1)[0, 0], has_none)
    of_q, of_k, _ = torch.autograd.grad(out.float().sum(), leaves)
    assert torch.equal(of_q.isnan().any(-1)[0, 0], has_none)
    assert bool(of_k[:, :, :71].isnan().all())


if __name__ == "__main__":
    if "emulated" in sys.argv:
        import emulated_amx  # noqa: F401
    sa.ops.build_native()
    what_is_no_number_stays_where_it_is()
    torch.save(dict(calls()), sys.argv[1])
