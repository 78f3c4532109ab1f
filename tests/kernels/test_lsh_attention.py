from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from penjing.kernels.lsh_attention import bucket_factors, hash_keys, lsh_attention, rotations

CPU = torch.device("cpu")


def pairs_that_meet(k: torch.Tensor, table: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """(B, KV, T, T) bool, token by token as the definition reads."""
    batch, kv_heads, num_tokens, _ = k.shape
    buckets = hash_keys(k, table, bucket_factors(num_tokens, chunk_size))
    num_chunks = -(-num_tokens // chunk_size)
    met = torch.zeros(batch, kv_heads, num_tokens, num_tokens, dtype=torch.bool)
    for b in range(batch):
        for head in range(kv_heads):
            for bucket in buckets[b, head].tolist():
                order = sorted(range(num_tokens), key=lambda token: (bucket[token], token))
                chunk = {token: place // chunk_size for place, token in enumerate(order)}
                for i in range(num_tokens):
                    for j in range(i + 1):
                        met[b, head, i, j] |= (chunk[i] - chunk[j]) % num_chunks in (0, 1)
    return met


@pytest.mark.parametrize(
    ("num_tokens", "chunk_size", "rounds", "heads", "kv_heads"),
    [(64, 8, 1, 2, 2), (61, 8, 2, 4, 2), (70, 8, 3, 3, 1), (97, 4, 4, 2, 1)],
)
def test_equals_attention_under_a_dense_mask_with_gradients(
    num_tokens: int, chunk_size: int, rounds: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penjing.kernels.lsh_attention.SCORES_AT_ONCE", {"cpu": 3000})  # several pieces
    torch.manual_seed(num_tokens)
    q, k, v = (torch.randn(2, count, num_tokens, 8, requires_grad=True) for count in (heads, kv_heads, kv_heads))
    table = rotations(3, kv_heads, 8, rounds, CPU)
    met = pairs_that_meet(k, table, chunk_size)
    assert met.sum() < 0.9 * num_tokens * (num_tokens + 1) / 2 * met.shape[0] * kv_heads  # else nothing is tested
    ours = lsh_attention(q, k, v, table, chunk_size)
    mask = met.repeat_interleave(heads // kv_heads, 1)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    gradient = torch.randn_like(ours)
    for mine, expected in zip(
        torch.autograd.grad(ours, (q, k, v), gradient), torch.autograd.grad(theirs, (q, k, v), gradient), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def test_equals_reformer_where_queries_are_keys() -> None:
    torch.manual_seed(0)
    heads, num_tokens, size, chunk_size, factors = 2, 96, 16, 8, [4, 4]
    config = ReformerConfig(
        num_attention_heads=heads,
        hidden_size=heads * size,
        attention_head_size=size,
        lsh_attn_chunk_length=chunk_size,
        num_hashes=1,
        num_buckets=factors,
        hash_seed=11,
        is_decoder=True,
        lsh_attention_probs_dropout_prob=0.0,
    )
    theirs = LSHSelfAttention(config).eval()
    hidden = torch.randn(1, num_tokens, heads * size)
    # The rotations that their seed gives, laid out as ours.
    torch.manual_seed(11)
    drawn = torch.randn(heads, size, 1, sum(factors) // 2)
    with torch.no_grad():
        expected = theirs(hidden).hidden_states
        q = theirs.query_key(hidden).view(1, num_tokens, heads, size).transpose(1, 2)
        v = theirs.value(hidden).view(1, num_tokens, heads, size).transpose(1, 2)
        k = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)
        assert bucket_factors(num_tokens, chunk_size) == [16]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penjing.kernels.lsh_attention.bucket_factors", lambda *_: factors)
            # One-hot values give the probabilities.
            ones = torch.eye(num_tokens).expand(1, heads, -1, -1)
            probability = lsh_attention(q, k, ones, drawn, chunk_size)
    alone = probability.diagonal(dim1=-2, dim2=-1) > 1 - 1e-6
    others = probability - torch.diag_embed(probability.diagonal(dim1=-2, dim2=-1))
    # Reformer does not let a token look at itself, unless it sees nothing else.
    others = torch.where(alone[..., None], torch.eye(num_tokens), others)
    ours = (others / others.sum(-1, keepdim=True)) @ v
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), expected, rtol=0, atol=1e-4)


def test_short_sequences_are_full_attention() -> None:
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in range(3))
    out = lsh_attention(q, k, v, rotations(0, 2, 8, 1, CPU), 16)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_similar_keys_find_each_other_over_any_distance() -> None:
    torch.manual_seed(5)
    num_tokens = 512
    q, k = torch.randn(1, 1, num_tokens, 16), torch.randn(1, 1, num_tokens, 16)
    k[0, 0, 500] = k[0, 0, 3] * 1.01
    values = torch.eye(num_tokens).expand(1, 1, -1, -1)
    probability = lsh_attention(q, k, values, rotations(1, 1, 16, 2, CPU), 16)[0, 0]
    assert probability[500, 3] > 0
    assert (probability > 0).sum(-1).max() <= 2 * 2 * 16
    torch.testing.assert_close(probability.sum(-1), torch.ones(num_tokens))
    assert probability.triu(1).abs().max() == 0


def test_bfloat16_is_close_to_float32() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 2, 100, 16).bfloat16() for _ in range(3))
    table = rotations(0, 2, 16, 2, CPU)
    expected = lsh_attention(q.float(), k.float(), v.float(), table, 8)
    assert lsh_attention(q, k, v, table, 8).dtype == torch.bfloat16
    torch.testing.assert_close(lsh_attention(q, k, v, table, 8).float(), expected, rtol=0, atol=3e-2)


def test_memory_between_the_passes_grows_with_tokens() -> None:
    def kept(num_tokens: int) -> int:
        q, k, v = (torch.randn(1, 2, num_tokens, 8, requires_grad=True) for _ in range(3))
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            lsh_attention(q, k, v, rotations(0, 2, 8, 2, CPU), 16)
        return sum(sizes.values())

    assert kept(4096) < 4.5 * kept(1024)


def test_rotations_are_fixed_normal_and_apart() -> None:
    table = rotations(7, 2, 32, 4, CPU)
    assert torch.equal(table, rotations(7, 2, 32, 4, CPU))
    assert abs(float(table.mean())) < 0.02
    assert abs(float(table.std()) - 1) < 0.02
    correlation = (table * rotations(8, 2, 32, 4, CPU)).mean()
    assert abs(float(correlation)) < 0.02


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k = torch.randn(1, 3, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="are needed"):
        lsh_attention(q, k, k, rotations(0, 2, 8, 1, CPU), 4)
