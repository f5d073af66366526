"""The public names are frozen: whoever changes one changes this file, on purpose."""

import inspect
import pydoc
import sys

from typed_calls import calls_with_plain_values, with_lists_and_tuples

import structattn as sa


def test_public_names() -> None:
    assert set(sa.__all__) == {
        "Attention",
        "AttentionFunction",
        "AttentionSpec",
        "DecoderPrograms",
        "GlobalWindowLayout",
        "HeadLayouts",
        "LanguageModel",
        "LayerCaches",
        "LevelCache",
        "LevelLayout",
        "Rotary",
        "RotaryScaling",
        "Sampling",
        "Storage",
        "StructuredLinear",
        "TextLayout",
        "TextUnits",
        "__version__",
        "attention_function",
        "cache",
        "errors",
        "export_decoder",
        "matrices",
        "mup",
        "ops",
        "parallel",
        "parse_spec",
        "replace_linears",
        "rotary_order",
        "scoring",
        "structured_attention",
    }
    assert all(hasattr(sa, name) for name in sa.__all__)
    assert {"Standard", "BTT", "MLR", "Matrix"} <= set(dir(sa.scoring))
    assert sa.scoring.LowRank is sa.scoring.Standard  # an earlier name
    assert set(sa.parallel.__all__) == {"ContextParallel", "SequenceShard", "context_parallel", "tensor_parallel_plan"}
    assert all(hasattr(sa.parallel, name) for name in sa.parallel.__all__)
    assert set(sa.matrices.__all__) >= {
        "BlockTensorTrain",
        "Butterfly",
        "Dense",
        "Kaleidoscope",
        "Kronecker",
        "LowRank",
        "MLBTC",
        "Monarch",
        "MultiLevelLowRank",
    }


def test_signatures() -> None:
    assert list(inspect.signature(sa.structured_attention).parameters) == [
        "q",
        "k",
        "v",
        "layout",
        "is_causal",
        "scale",
        "window",
        "attn_bias",
        "dropout_p",
        "cu_seqlens",
        "left_padding",
        "backend",
        "return_lse",
        "attn_mask",
        "softcap",
        "sinks",
        "alibi_slopes",
        "cu_seqlens_k",
    ]
    assert list(inspect.signature(sa.Attention).parameters)[:9] == [
        "embed_dim",
        "num_heads",
        "num_kv_heads",
        "scoring",
        "layout",
        "is_causal",
        "qk_norm",
        "rotary",
        "bias",
    ]
    assert list(inspect.signature(sa.LevelLayout).parameters) == [
        "ranks",
        "block_sizes",
        "scaling",
        "value_ranks",
        "boundaries",
        "windows",
        "sink_tokens",
    ]


def test_help_of_attention_fits_two_screens() -> None:
    lines = pydoc.render_doc(sa.Attention, renderer=pydoc.plaintext).split("\n")
    longest = 124 if sys.version_info < (3, 13) else 200  # from 3.13 on pydoc gives each parameter a line
    assert next(number for number, line in enumerate(lines) if "inherited from" in line) <= longest


def test_lists_are_kept_as_tuples() -> None:
    for from_lists, from_tuples in with_lists_and_tuples():
        assert from_lists == from_tuples
        assert isinstance(from_lists, dict) or hash(from_lists) == hash(from_tuples)


def test_a_bool_chooses_what_the_op_returns() -> None:
    for return_lse in (False, True):
        assert isinstance(calls_with_plain_values(return_lse), tuple) == return_lse
