"""The table of tiles that a search on a GPU writes: the kernels take its tiles, and a bad one is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from structattn.errors import ConfigError
from structattn.layout.levels import LevelLayout

pytest.importorskip("triton", reason="triton is not installed")

from structattn.ops.triton import cached_attention, config
from structattn.ops.triton.plan import Tiles
from structattn.ops.triton.tile_table import KERNELS, PACKAGED, TileEntry, TileTable, read_tiles

H100 = (9, 0)
LEVELS = LevelLayout.halving((16,) * 4, 4096)
TILES = Tiles(own=64, walk=128, num_warps=4, num_stages=4)
SHAPE = {"itemsize": 2, "dim": 64, "levels": 8, "values": False}


def entry(kernel: str = "forward", tiles: Tiles = TILES, **changes: object) -> TileEntry:
    fields = {"own": tiles.own, "walk": tiles.walk, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return TileEntry(kernel=kernel, **(SHAPE | fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels are compiled; the interpreter takes the smallest tiles always."""
    monkeypatch.setattr(config, "INTERPRETED", False)
    monkeypatch.setattr(cached_attention, "INTERPRETED", False)
    for function in (config._config_for, cached_attention.tiles_for):
        function.cache_clear()
    before = config.tiles_in_use()
    yield
    config.use_tiles(before)
    for function in (config._config_for, cached_attention.tiles_for):
        function.cache_clear()


def use(path: Path, *entries: TileEntry) -> TileTable:
    path.write_text(TileTable({H100: entries}).to_json())
    table = read_tiles(path)
    config.use_tiles(table)
    return table


def test_kernels_take_the_tiles_of_a_table(compiled, tmp_path: Path) -> None:
    rules = config.default_config(LEVELS, torch.bfloat16, 64, capability=H100)
    use(tmp_path / "tiles.json", *(entry(kernel) for kernel in KERNELS))
    found = config.default_config(LEVELS, torch.bfloat16, 64, capability=H100)
    assert {found.forward, found.grad_queries, found.grad_keys, found.decode} == {TILES}
    assert rules.forward != TILES
    # Another GPU, dtype, dimension, number of levels or kind of values has no entry: the rules hold.
    for layout, dtype, value_dim, capability in (
        (LEVELS, torch.bfloat16, 64, (8, 0)),
        (LEVELS, torch.bfloat16, 64, None),
        (LEVELS, torch.float32, 64, H100),
        (LEVELS, torch.bfloat16, 128, H100),
        (LevelLayout.halving((4,) * 9, 4096), torch.bfloat16, 64, H100),
        (LevelLayout.halving((16,) * 4, 4096, value_ranks=(16,) * 4), torch.bfloat16, 64, H100),
    ):
        assert config.default_config(layout, dtype, value_dim, capability=capability).forward != TILES


def test_the_smallest_shape_that_fits_counts(compiled, tmp_path: Path) -> None:
    others = {levels: Tiles(own=32, walk=16 * levels, num_warps=2, num_stages=1) for levels in (2, 4)}
    use(tmp_path / "tiles.json", entry(), *(entry(tiles=tiles, levels=levels) for levels, tiles in others.items()))
    for levels, tiles in ((1, others[2]), (3, others[4]), (4, others[4]), (5, TILES)):
        layout = LevelLayout.halving((8,) * levels, 4096)
        assert config.default_config(layout, torch.float16, 64, capability=H100).forward == tiles


def test_tiles_of_a_table_may_use_the_memory_of_their_gpu_and_no_more(compiled, tmp_path: Path) -> None:
    large = Tiles(own=128, walk=128, num_warps=8, num_stages=4)
    path = tmp_path / "tiles.json"
    path.write_text(TileTable({gpu: (entry(tiles=large),) for gpu in (H100, (8, 9))}).to_json())
    config.use_tiles(read_tiles(path))
    large_gpu, small_gpu = (
        config.default_config(LEVELS, torch.bfloat16, 64, capability=gpu).forward for gpu in (H100, (8, 9))
    )
    assert large_gpu == large
    assert (small_gpu.own, small_gpu.num_stages) != (large.own, large.num_stages)


def test_decoding_over_a_cache_takes_the_tiles_of_a_table(compiled, tmp_path: Path) -> None:
    table = use(tmp_path / "tiles.json", entry("cached"))
    ask = ((16,) * 4, (64,), 2)
    assert cached_attention.tiles_for(*ask, 200, False, H100, table) == TILES
    assert cached_attention.tiles_for(*ask, 20, False, H100, table).own == 32
    assert cached_attention.tiles_for(*ask, 200, False, (8, 0), table) != TILES


def test_the_table_of_the_package_can_be_read() -> None:
    assert json.loads(PACKAGED.read_text())["format_version"] == 1
    assert isinstance(read_tiles(PACKAGED), TileTable)


GOOD = json.loads(TileTable({H100: (entry(),)}).to_json())
ROW = GOOD["capabilities"]["9.0"][0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is no table of tiles"),
        (json.dumps(GOOD | {"format_version": 2}), "expected format version 1, got 2"),
        (json.dumps(GOOD | {"capabilities": []}), "capabilities must be an object"),
        (json.dumps(GOOD | {"capabilities": {"sm90": []}}), "written as 9.0, got 'sm90'"),
        (json.dumps(GOOD | {"capabilities": {"9.0": {}}}), "9.0: expected a list"),
        (json.dumps(GOOD | {"capabilities": {"9.0": [{"own": 16}]}}), "entry 0: expected the fields"),
        *(
            (json.dumps(GOOD | {"capabilities": {"9.0": [ROW, ROW | change]}}), f"entry 1: {message}")
            for change, message in (
                ({"kernel": "sideways"}, "kernel must be one of forward, "),
                ({"own": 48}, "own must be a power of two of at least 16, got 48"),
                ({"walk": 8}, "walk must be a power of two of at least 16, got 8"),
                ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
                ({"itemsize": 8}, "itemsize must be 2 or 4"),
                ({"values": 1}, "values must be of type bool"),
                ({"dim": 64.0}, "dim must be of type int"),
            )
        ),
    ],
)
def test_a_bad_table_is_an_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tiles.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_tiles(tmp_path / "tiles.json")


def test_a_missing_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tiles(tmp_path / "none.json")
