"""The KV cache: positions of rows of different lengths, and selected rows."""

from __future__ import annotations

import pytest
import torch

from firth.models import make_model
from firth.models.config import ALiBi, Rotary, Shaw, SlidingWindow, T5Bias, TransformerXL
from firth.models.kv_cache import KVCache, can_cache, select_rows
from firth.models.presets import gpt2, llama

V = 50
DECODERS = {
    "learned": gpt2(2, 16, 2, V),
    "rotary": llama(2, 16, 4, 24, V, num_kv_heads=2),
    "alibi": gpt2(2, 16, 4, V, position=ALiBi()),
    "buckets": gpt2(2, 16, 4, V, position=T5Bias(8, 10)),
    "shaw": gpt2(2, 16, 4, V, position=Shaw(3)),
    "windows": llama(4, 16, 4, 24, V, window=SlidingWindow(4, 2), position=Rotary(local_theta=100.0)),
    "windows and shaw": gpt2(4, 16, 4, V, window=SlidingWindow(4, 2), position=Shaw(3)),
}


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("lengths", [[5, 3, 7], [4, 4, 4]], ids=["uneven", "even"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_cached_states_equal_uncached_ones(name: str, lengths: list[int], fixed: bool) -> None:
    torch.manual_seed(0)
    model = make_model(DECODERS[name]).eval()
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.1)
    ids, row = torch.randint(0, V, (3, 12)), torch.arange(3)
    whole = model.stack(model.embed(ids), None)
    cache, length = KVCache(model.stack, 16, fixed), torch.tensor(lengths)
    found = cache.prefill(model.embed(ids[:, : max(lengths)]), lengths)[row, length - 1]
    for step in range(5):
        torch.testing.assert_close(found, whole[row, length - 1 + step], atol=1e-5, rtol=1e-5)
        found = cache.decode_step(model.embed(ids[row, length + step][:, None], cache.next_position_B[:, None]))[:, 0]
        cache.advance()
        assert cache.next_position_B.tolist() == [n + step + 1 for n in lengths]


@torch.no_grad()
def test_cached_states_have_the_uncached_dtype() -> None:
    model = make_model(gpt2(2, 16, 2, V)).eval()
    model.stack.residual, ids = torch.bfloat16, torch.randint(0, V, (2, 6))
    with torch.autocast("cpu", torch.bfloat16):
        whole = model.stack(model.embed(ids), None)
        assert torch.equal(KVCache(model.stack, 8).prefill(model.embed(ids), [6, 6]), whole)


@torch.no_grad()
def test_buffers_keep_their_addresses() -> None:
    """A captured CUDA graph reads them: also after rows are reordered."""
    torch.manual_seed(0)
    model = make_model(DECODERS["rotary"]).eval()
    cache = KVCache(model.stack, 8, is_static=True)
    cache.prefill(model.embed(torch.tensor([[1, 2, 3], [4, 5, 6]])), [3, 2])
    kept = [cache.next_position_B, *(x for layer in cache.layers for x in (layer.k, layer.v))]
    where, before = [x.data_ptr() for x in kept], [x.clone() for x in kept]
    cache.reorder(torch.tensor([1, 0]))
    assert [
        x.data_ptr() for x in (cache.next_position_B, *(x for layer in cache.layers for x in (layer.k, layer.v)))
    ] == where
    for x, was in zip(kept, before, strict=True):
        torch.testing.assert_close(x, was.flip(0))
    cache.decode_step(model.embed(torch.tensor([[7], [8]]), cache.next_position_B[:, None]))
    assert cache.layers[0].k.data_ptr() == where[1]
    assert cache.layers[0].k.shape == (2, 2, 8, 4)


def test_select_rows() -> None:
    x = torch.arange(3)
    assert select_rows(x, torch.tensor([2, 0])).tolist() == [2, 0]
    assert select_rows(x, torch.tensor([0, 0, 1, 2])).tolist() == [0, 0, 1, 2]
    assert select_rows(x, torch.tensor([2, 2, 0])).tolist() == [2, 2, 0]
    assert x.tolist() == [2, 2, 0]
    y = torch.arange(4).view(2, 1, 2)
    assert select_rows(y, torch.tensor([1, 0]), width=1).tolist() == [[[2, 1]], [[0, 3]]]


def test_which_models_support_a_kv_cache() -> None:
    assert all(map(can_cache, DECODERS.values()))
    assert not can_cache(gpt2(2, 16, 2, V, position=TransformerXL()))
