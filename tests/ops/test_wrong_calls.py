"""Every wrong call of the op, and of ``explain``, raises an error of ours that says what to do: one table."""

import math

import numpy as np
import pytest
import torch

import structattn as sa
from structattn.errors import BackendUnavailableError, ConfigError, ShapeError, StructAttnError
from structattn.layout.text import TextLayout
from structattn.ops import explain

Q = torch.randn(2, 4, 6, 8)
K = torch.randn(2, 2, 6, 8)
ONE = {"q": Q[:1], "k": K[:1], "v": K[:1]}
GLOBAL_WINDOW = sa.GlobalWindowLayout((4, 4), 2)


def distributed(x):
    class DTensor(torch.Tensor):  # a real one needs a process group; it is known by its name
        pass

    return x.as_subclass(DTensor)


NOT_TENSORS = [None, [[1.0]], 3, "q", np.zeros((2, 4, 6, 8)), torch.nn.Identity()]
NOT_DENSE = [
    Q.to_sparse(),
    Q[0, 0].to_sparse_csr(),
    torch.nested.nested_tensor([Q[0], Q[1]]),
    torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged),
    distributed(Q),
]
NOT_FLOATING = [Q.long(), Q > 0, Q.to(torch.complex64), Q.to(torch.float8_e4m3fn)]
WRONG_SHAPES = [Q[0], Q[:, :3], Q[:1], Q[..., :7], Q[..., :0], Q[:0], Q[:, :0], Q.double(), Q.to("meta")]
TENSORS = [*NOT_TENSORS, *NOT_DENSE, *NOT_FLOATING]
LENGTHS = [[0, 6], (0, 6), 6, "0,6", np.array([0, 6]), torch.tensor([0.0, 6.0]), torch.tensor([[0, 6]])]
LENGTHS += [
    torch.tensor([0, 6]).to("meta"),
    torch.tensor([False, True]),
    torch.tensor([0, 6]).to_sparse(),
    torch.tensor(6),
]

WRONG = {
    "q": [*TENSORS, *WRONG_SHAPES],
    "k": [*TENSORS, *WRONG_SHAPES[:8], Q[:, :, :0], K[..., :7]],
    "v": [*TENSORS, *WRONG_SHAPES[:2], Q[..., :0], K[:, :, :5], K[:, :1], K.double()],
    "layout": [
        *(Q, Q[0, 0] > 0, "mlr:4|4", "standard", (4, 4), [4, 4], 8, False, sa.LevelLayout, np.zeros(3)),
        sa.LevelLayout((4, 3), (8, 4)),
        sa.GlobalWindowLayout((4, 3), 2),
        sa.LevelLayout((4, 4), (8, 4), value_ranks=(1, 1)),
        sa.LevelLayout.from_boundaries((8,), [((0,),)] * 3),
        TextLayout((4, 4)),
    ],
    "is_causal": ["no", 1, 0, None, torch.tensor(True), np.True_, [True]],
    "scale": [math.nan, math.inf, -math.inf, "1", True, [1.0], torch.tensor(1.0), 1j],
    "window": [0, -1, 2.0, "2", True, (1, 2), torch.tensor(2), math.inf, 2**70, NOT_DENSE[2]],
    "attn_bias": [
        *(*NOT_TENSORS[1:], *NOT_DENSE, Q.long(), Q > 0, Q.to(torch.complex64), torch.zeros(6, 6).to("meta")),
        torch.zeros(5, 6),
        torch.zeros(1, 1, 1, 6, 6),
        torch.zeros(3, 1, 6, 6),
        torch.zeros(6, 6).to(torch.float8_e4m3fn),
    ],
    "attn_mask": [
        *(*NOT_TENSORS[1:], *NOT_DENSE, Q.long(), Q.to(torch.complex64), torch.zeros(6, 6).bool().to("meta")),
        torch.zeros(5, 6).bool(),
        torch.zeros(1, 1, 1, 6, 6).bool(),
        torch.zeros(3, 1, 6, 6),
        torch.zeros(6, 6).to(torch.float8_e4m3fn),
    ],
    "dropout_p": [1.0, -0.1, math.nan, "0.1", None, True, [0.1], torch.tensor(0.1), 2],
    "cu_seqlens": [torch.tensor([0, 6])],  # the batch is 2
    "left_padding": [*LENGTHS, torch.tensor([0, 7]), torch.tensor([-1, 0]), torch.tensor([0]), torch.tensor([0, 0, 0])],
    "backend": ["cuda", "fast", "Blocked", "", None, True, 3, ["blocked"], torch.tensor(1), "sdpa"],
    "return_lse": [1, "yes", None, torch.tensor(True)],
    "softcap": [0, 0.0, -1.0, math.nan, math.inf, 1e-30, 1e30, "1", True, [1.0], torch.tensor(1.0), 1j],
    "sinks": [
        *(*NOT_TENSORS[1:], *NOT_DENSE, Q[0, :, 0, 0].long(), Q[0, :, 0, 0] > 0, 1.0, [0.0] * 4),
        *(torch.zeros(2), torch.zeros(4, 1), torch.zeros(()), torch.zeros(1, 4), torch.zeros(4, device="meta")),
    ],
    "alibi_slopes": [
        *(*NOT_TENSORS[1:], *NOT_DENSE, Q[0, :, 0, 0].long(), Q[0, :, 0, 0] > 0, 1.0, [0.0] * 4),
        *(torch.zeros(2), torch.zeros(4, 2), torch.zeros(()), torch.zeros(1, 4), torch.zeros(4, device="meta")),
        torch.zeros(4, requires_grad=True),
    ],
}
PAIRS = [
    *({**ONE, "cu_seqlens": lengths} for lengths in LENGTHS),
    *({**ONE, "cu_seqlens": lengths, "layout": sa.LevelLayout((4, 4), (8, 4))} for lengths in LENGTHS),
    *(
        {**ONE, "cu_seqlens": torch.tensor(ends)}
        for ends in ([0, 4], [1, 6], [0, 4, 3, 6], [0, 7], [0, 5, 3, 6], [0], [], [-1, 6])
    ),
    {**ONE, "q": Q[:1, :, :3], "cu_seqlens": torch.tensor([0, 3])},
    *({**ONE, "cu_seqlens": torch.tensor([0, 6]), "cu_seqlens_k": lengths} for lengths in LENGTHS),
    *(
        {**ONE, "cu_seqlens": torch.tensor([0, 3, 6]), "cu_seqlens_k": torch.tensor(ends)}
        for ends in ([0, 6], [0, 2, 2, 6], [1, 3, 6], [0, 7, 6], [0, 4, 5], [0])
    ),
    *(
        {**ONE, "cu_seqlens_k": torch.tensor([0, 3, 6]), "cu_seqlens": torch.tensor(ends)}
        for ends in ([0, 6], [0, 7, 6], [0, 3, 7], [0, 3, 5])
    ),
    {"cu_seqlens_k": torch.tensor([0, 6])},
    {**ONE, "cu_seqlens": torch.tensor([0, 6]), "left_padding": torch.tensor([0])},
    {**ONE, "cu_seqlens": torch.tensor([0, 3, 6]), "layout": sa.LevelLayout.from_boundaries((8,), [((0,),)] * 3)},
    {"attn_mask": torch.zeros(6, 6), "attn_bias": torch.zeros(6, 6)},
    {"layout": GLOBAL_WINDOW, "return_lse": True},
    {"layout": GLOBAL_WINDOW, "window": 2},
    {"layout": GLOBAL_WINDOW, "scale": 1.0},
]
CALLS = [*({name: value} for name, values in WRONG.items() for value in values), *PAIRS]


def test_every_wrong_call_is_refused_in_words() -> None:
    for changes in CALLS:
        for function in (sa.structured_attention, explain):
            arguments = {"q": Q, "k": K, "v": K, **changes}
            if function is explain and "backend" in changes:
                continue
            with pytest.raises(StructAttnError) as caught:
                function(**arguments)
            assert next(iter(changes)) in {*"qkv"} or any(name in str(caught.value) for name in changes), caught.value


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": Q[0, 0] > 0}, ConfigError, "attn_mask=.*bool .True: visible.*attn_bias="),
        ({"layout": "mlr:4|4"}, ConfigError, "'mlr:4|4' .str.; .*from_spec"),
        ({"attn_bias": torch.ones(6, 6, dtype=torch.bool)}, ShapeError, "bool mask"),
        ({"q": torch.zeros(2, 4, 6, 8, 1)}, ShapeError, "4-dimensional"),
        ({"q": None}, ShapeError, "q must be a torch.Tensor, got None"),
        ({"q": distributed(Q)}, ShapeError, "to_local"),
        ({"k": NOT_DENSE[3]}, ShapeError, "cu_seqlens"),
        ({"is_causal": "no"}, ConfigError, "is_causal must be True or False, got 'no'"),
        ({"scale": math.nan}, ConfigError, "scale must be a finite number, got nan"),
        ({"backend": "block"}, ConfigError, "did you mean 'blocked'"),
        (
            {"q": Q.double(), "k": K.double(), "v": K.double(), "backend": "triton"},
            BackendUnavailableError,
            "cannot run",
        ),
    ],
)
def test_messages_name_the_remedy(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        sa.structured_attention(**{"q": Q, "k": K, "v": K, **changes})


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
def test_the_meta_device_gives_shapes(backend) -> None:
    layouts = [None, sa.LevelLayout((4, 4), (8, 4), value_ranks=(4, 4)), GLOBAL_WINDOW]
    layouts.append(sa.LevelLayout.from_boundaries((4, 4), [((0,), (0, 2)), ((0,), (0, 3))]))
    for layout in layouts:
        for options in (
            {},
            {"window": 2},
            {"dropout_p": 0.5},
            {"left_padding": torch.tensor([1, 0])},
            {"is_causal": False},
        ):
            if options == {"window": 2} and layout is GLOBAL_WINDOW:
                continue
            found = []
            for x in (Q, Q.to("meta")):
                leaf = x.clone().requires_grad_()
                extra = {name: y.to(x.device) if isinstance(y, torch.Tensor) else y for name, y in options.items()}
                extra["attn_bias"] = torch.zeros(6, 6, device=x.device)
                with torch.device("meta"):  # the default device of what is made inside has no numbers
                    out = sa.structured_attention(leaf, x[:, :2], x[:, :2], layout, backend=backend, **extra)
                    out.backward(torch.ones_like(out))
                found.append((out.shape, out.dtype, out.device, leaf.grad.shape))
            assert found[0][:2] == found[1][:2]
            assert (found[0][2].type, found[1][2].type) == ("cpu", "meta")
