"""The simulation of a divided sequence, against closed forms and against what the library counts."""

import dataclasses

import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError
from structattn.testing.tolerances import COMPUTED
from structattn_lab.planning.parallel_time import SCHEMES, Devices, Layer, _work, layer_time

T, N = 1024, 8
LAYOUTS = {
    "one level": sa.LevelLayout.halving((16,), T),
    "levels": sa.LevelLayout.halving((4, 4, 4, 4), T, value_ranks=(4, 4, 4, 4)),
    "sliding": sa.LevelLayout.sliding((4, 4, 4, 4), (None, 512, 256, 128)),
}
FAST = Devices(count=N, flops=1e9, link=1e15, latency=0.0)
SLOW = Devices(count=N, flops=1e15, link=1e6, latency=0.0)


def layer(name: str, **changes: object) -> Layer:
    return Layer(layout=LAYOUTS[name], num_positions=T, num_heads=4, num_kv_heads=2, **changes)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_work_is_done_once(name, scheme) -> None:
    work, layout = _work(layer(name), N, scheme), LAYOUTS[name]
    done = (work.local + work.spans + work.helped).sum(1)
    assert done.tolist() == pytest.approx([4 * layout.score_flops(T), 4 * layout.value_flops(T, 16)], rel=COMPUTED)
    assert sum(work.lengths) == T


def test_contiguous_shards_of_one_level_take_twice_the_mean_and_a_head_and_a_tail_take_it() -> None:
    mean = 4 * (4 * 16) * (T * (T + 1) / 2) / N / FAST.flops
    contiguous, even = (layer_time(layer("one level"), FAST, scheme) for scheme in ("contiguous", "head-tail"))
    assert contiguous.forward == pytest.approx((2 - 1 / N) * mean, rel=0.01)
    for time in (even, layer_time(layer("one level"), FAST, "shared rectangles")):
        assert time.forward == pytest.approx(mean, rel=0.01)
        assert time.backward == pytest.approx(2.5 * mean, rel=0.01)
    assert contiguous.step(checkpointing=True) == 2 * contiguous.forward + contiguous.backward


@pytest.mark.parametrize("name", LAYOUTS)
def test_slow_links_take_the_bytes_that_the_layout_counts(name) -> None:
    for scheme in ("contiguous", "head-tail"):
        counted = LAYOUTS[name].communication_bytes(T, N, order=scheme, num_kv_heads=2, dtype=torch.bfloat16)
        received = [sum(row[p] for row in (*counted.keys, *counted.values)) for p in range(N)]
        most = max(*counted.forward, *received)
        time = layer_time(layer(name), SLOW, scheme)
        assert time.most_bytes == most
        assert time.forward == pytest.approx(most / SLOW.link, rel=0.01)
        assert time.backward == pytest.approx(most / SLOW.link, rel=0.01)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_and_a_tail_are_even_and_linear_layers_are_too(name) -> None:
    given = layer(name, linear_flops=1e4)
    times = {scheme: layer_time(given, FAST, scheme) for scheme in SCHEMES}
    assert times["head-tail"].step() < 0.9 * times["contiguous"].step()
    assert times["uneven lengths"].step() < 0.9 * times["contiguous"].step()
    assert times["head-tail"].most_tokens == T // N < times["uneven lengths"].most_tokens


def test_queries_of_grouped_heads_are_more_bytes_than_keys() -> None:
    grouped = layer("one level")
    alike = dataclasses.replace(grouped, num_kv_heads=4)
    both = [{s: layer_time(x, SLOW, s).forward for s in ("contiguous", "shared rectangles")} for x in (grouped, alike)]
    assert both[0]["shared rectangles"] > both[0]["contiguous"]
    assert both[1]["shared rectangles"] < both[1]["contiguous"]


def test_two_processes_share_their_rectangle_by_halves() -> None:
    pair, shard = dataclasses.replace(SLOW, count=2), T // 2
    time = layer_time(layer("one level"), pair, "shared rectangles")
    keys = shard * 2 * (16 + 16) * 2  # G = 2, D = V = 16, bfloat16
    queries = shard // 2 * 4 * 16 * 2  # of H = 4 heads
    numbers = shard // 2 * 4 * 4  # one float32 each
    assert time.most_bytes == keys + queries + numbers
    assert time.forward == pytest.approx((keys + queries + numbers) / pair.link, rel=0.01)
    assert time.backward == pytest.approx((queries + 2 * numbers + keys) / pair.link, rel=0.01)


def test_one_process_sends_nothing() -> None:
    alone = dataclasses.replace(SLOW, count=1, latency=1.0)
    for scheme in SCHEMES:
        time = layer_time(layer("levels"), alone, scheme)
        assert time.most_bytes == 0
        assert time.step() < 0.01


def test_wrong_numbers() -> None:
    with pytest.raises(ConfigError, match="link"):
        Devices(count=2, flops=1e12, link=0.0)
    with pytest.raises(ConfigError, match="scheme"):
        layer_time(layer("levels"), FAST, "ring")
