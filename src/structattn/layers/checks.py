"""What the parts of an attention layer need of each other, and of its inputs."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from structattn.cache import LevelCache
from structattn.cache.bounded import LayerCache
from structattn.checks import check_like, check_tensor, check_type, describe, is_int
from structattn.errors import ConfigError, ShapeError
from structattn.layers.rotary import Rotary
from structattn.layers.scoring import MLR, Scoring, Standard
from structattn.layout.checks import check_sum
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout


def check_states(name: str, states: Tensor, embed_dim: int, weight: Tensor) -> None:
    """Raises ``ShapeError`` unless these are hidden states (B, T, embed_dim) that a weight can read; B and T
    may be 0.
    """
    check_tensor(name, states)
    if states.dim() != 3 or states.shape[-1] != embed_dim:
        remedy = ""
        if not states.is_floating_point():
            remedy = "; these are hidden states: embed token ids first"
        elif states.dim() == 2 and states.shape[-1] == embed_dim:
            remedy = f"; {name}[None] is a batch of one"
        raise ShapeError(f"{name} must have shape (batch, length, {embed_dim}), got {tuple(states.shape)}{remedy}")
    check_like(name, states, weight)


def check_kv_heads(num_kv_heads: object) -> None:
    """Raises ``ConfigError`` unless the third argument of a layer is a number of heads or ``None``."""
    if not (num_kv_heads is None or is_int(num_kv_heads)):
        raise ConfigError(
            f"num_kv_heads, the third argument, must be an int or None, got {describe(num_kv_heads)}; give options "
            "such as dropout by name"
        )


def check_rotary(rotary: object) -> None:
    """Raises ``ConfigError`` unless it is a ``Rotary``, a function or ``None``."""
    if isinstance(rotary, type) or not (rotary is None or callable(rotary) or isinstance(rotary, Rotary)):
        raise ConfigError(
            f"rotary must be a Rotary, a function of x and positions, or None, got {describe(rotary)}; for the usual "
            "rotation give Rotary(), for text Rotary.parse(text)"
        )


def check_layout(
    layout: AnyLayout | TextLayout | None,
    window: int | None,
    scoring: Scoring,
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Raises ``ConfigError`` unless a layout fits the scoring, the heads and the window of its layer."""
    layouts = AnyLayout | TextLayout | None
    remedy = (
        "give a LevelLayout, such as LevelLayout.halving((32, 16, 8, 8), 1024), or use Attention.from_spec for text"
    )
    check_type("layout", layout, layouts, "a LevelLayout, GlobalWindowLayout, HeadLayouts, TextLayout or None", remedy)
    if isinstance(layout, HeadLayouts):
        if not isinstance(scoring, Standard | MLR) and num_heads != num_kv_heads:
            raise ConfigError(
                f"the heads of {type(scoring).__name__} have keys of their own, and so the layouts: expected as many "
                f"key heads as the {num_heads} heads, got {num_kv_heads}; leave num_kv_heads out, or give one layout"
            )
        layout.check_heads(num_kv_heads)
        for of_head, _ in layout.groups:
            check_layout(of_head, window, scoring, embed_dim, num_heads, num_kv_heads)
        return
    feature_dim = scoring.feature_dim(embed_dim, num_heads)
    if layout is not None:
        what = f"the feature dimension of {type(scoring).__name__}"
        what += " (embed_dim / num_heads)" if isinstance(scoring, Standard) else ""
        check_sum("the ranks of the layout", layout.ranks, feature_dim, what)
    if window is not None and isinstance(layout, GlobalWindowLayout):
        raise ConfigError("a global-window layout has its own window: leave window at None")
    value_ranks = layout.value_ranks if isinstance(layout, LevelLayout | TextLayout) else None
    if value_ranks is not None:
        check_sum("the value_ranks of the layout", value_ranks, embed_dim // num_heads, "the head dimension")


def check_left_out(what: str, **options: object) -> None:
    """Raises ``ConfigError`` unless options that do not go together with another one are ``None``."""
    if any(option is not None for option in options.values()):
        *first, last = options
        raise ConfigError(f"with {what}, leave {', '.join(first)} and {last} at None")


def check_is_shard(shard: object) -> None:
    """Raises ``ConfigError`` unless it is a ``SequenceShard``."""
    from structattn.parallel.shard import SequenceShard  # torch.distributed, which few need

    check_type("shard", shard, SequenceShard, "a sa.parallel.SequenceShard of the mesh and the tokens in all")


def check_shard(layout: AnyLayout | TextLayout | None, backend: str, dropout: float) -> None:
    """Raises ``ConfigError`` unless attention with these options can be divided among processes."""
    layouts = layout.layouts if isinstance(layout, HeadLayouts) else (layout,)
    if any(isinstance(each, GlobalWindowLayout | TextLayout) for each in layouts):
        raise ConfigError(
            f"processes can divide the sequence of a LevelLayout or of none, got {layout}: choose another spec, such "
            "as mlr or sliding, or leave sequences whole"
        )
    if backend != "auto":
        raise ConfigError(
            "where processes divide a sequence, each part takes the fastest backend: leave backend at 'auto', got "
            f"{backend!r}"
        )
    if dropout:
        raise ConfigError(
            "where processes divide a sequence, attention weights have no dropout: set it to 0, or leave sequences "
            f"whole; got {dropout}"
        )


def check_cache(cache: object, layer: nn.Module, layout: AnyLayout | TextLayout | None, window: int | None) -> None:
    """Raises ``ConfigError`` unless a cache is of a layer with that layout and window, or like its own and of
    no layer yet.
    """
    check_type("cache", cache, LayerCache, "a LevelCache, as new_cache() makes one")
    assert isinstance(cache, LayerCache)
    if not _has_levels_of(cache, layout) or cache.window != window:
        raise ConfigError(
            f"the cache is of another layer: expected layout {layout} and window {window}, got "
            f"{cache.text or cache.layout} and {cache.window}; make it with new_cache()"
        )
    if isinstance(cache, LevelCache):
        if cache.chunk_size is not None:
            raise ConfigError(
                f"a query sees chunks of {cache.chunk_size} tokens in this cache, and all tokens in the layer: make it "
                "with new_cache()"
            )
        cache.check_layer(layer)


def _has_levels_of(cache: LayerCache, other: AnyLayout | TextLayout | None) -> bool:
    """Whether a cache has the levels of a layout; the segments of single rows may be in another order."""
    if cache.text is not None or isinstance(other, TextLayout):
        return cache.text == other
    layout = cache.layout
    if isinstance(layout, LevelLayout) and isinstance(other, LevelLayout) and layout.num_rows is not None:
        return replace(layout, boundaries=other.boundaries) == other if other.boundaries else False
    return layout == other


def check_fits(layout: AnyLayout | None, head_dim: int, value_dim: int) -> None:
    """Raises ``ConfigError`` unless the ranks of a layout sum to the dimensions of a model's heads."""
    if layout is None:
        return
    if isinstance(layout, HeadLayouts):
        for of_head, _ in layout.groups:
            check_fits(of_head, head_dim, value_dim)
        return
    check_sum("the ranks", layout.ranks, head_dim, "the head dimension of the model")
    values = layout.value_ranks if isinstance(layout, LevelLayout) else None
    if values is not None:
        check_sum("the values= ranks", values, value_dim, "the value dimension of the model")


def check_layout_of_call(layout: AnyLayout | TextLayout | None, layout_of_call: object) -> None:
    """Raises ``ConfigError`` unless a call gives a layout where the module has a ``TextLayout``, and one of
    that kind, and none otherwise.
    """
    named = str(layout_of_call) if isinstance(layout_of_call, LevelLayout) else describe(layout_of_call)
    if isinstance(layout, TextLayout):
        if not layout.fits(layout_of_call):
            raise ConfigError(
                f"a module with {layout} needs the layout of each text, layout.at(text_units.segments(tokens)): got "
                f"{named}"
            )
    elif layout_of_call is not None:
        raise ConfigError(f"the layout of this module is always {layout}: leave layout at None, got {named}")
