"""Small networks, each with a trait that pruning a module cannot follow: sizes that stand in the source."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def image(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size)


def rows(width: int = 24, length: int = 6) -> Tensor:
    return torch.randn(2, length, width)


class HeadsInTheSource(nn.Module):
    """As OPT: view(batch, -1, heads, width of a head), the scale from the width."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def cut(self, x: Tensor, batch: int) -> Tensor:
        return x.view(batch, -1, self.heads, self.dim).transpose(1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        together = (batch * self.heads, -1, self.dim)
        q = self.cut(self.q(x) * self.dim**-0.5, batch).view(*together)
        k, v = self.cut(self.k(x), batch).view(*together), self.cut(self.v(x), batch).view(*together)
        mixed = torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
        mixed = mixed.view(batch, self.heads, length, self.dim).transpose(1, 2)
        return self.o(mixed.reshape(batch, length, width))


class WidthOverHeads(HeadsInTheSource):
    """As diffusers: the width of a head is counted from that of the keys."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        dim = k.shape[-1] // self.heads
        q, k, v = (y.view(batch, -1, self.heads, dim).transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, self.heads * dim))


class OneProjection(nn.Module):
    """As GPT-2: one product for queries, keys and values, split(width); stored (in, out)."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.weight, self.bias = nn.Parameter(torch.randn(width, 3 * width)), nn.Parameter(torch.randn(3 * width))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.addmm(self.bias, x.view(-1, self.width), self.weight).view(*x.shape[:2], 3 * self.width)
        shape = (*x.shape[:2], self.heads, self.width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts.split(self.width, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        return self.out(mixed.view(*x.shape[:2], self.width))


class Windows(nn.Module):
    """As Swin: pad, roll, windows, a mask, a table of relative positions, roll back, slice, merge by strided slices."""

    index: Tensor

    def __init__(self, width: int = 16, heads: int = 2, window: int = 2) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.embed, self.norm = nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", (apart[..., 0] * (2 * window - 1) + apart[..., 1]).flatten())
        self.merge = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x).permute(0, 2, 3, 1))
        batch, height, wide, width = x.shape
        w, heads = self.window, self.heads
        y = torch.roll(F.pad(x, (0, 0, 0, 1, 0, 1)), (-1, -1), (1, 2))
        rows, columns = (height + 1) // w, (wide + 1) // w
        y = y.view(batch, rows, w, columns, w, width).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(batch * rows * columns, w * w, width)
        qkv = self.qkv(y).reshape(y.shape[0], w * w, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        scores = qkv[0] * (width // heads) ** -0.5 @ qkv[1].transpose(-2, -1)
        scores = scores + self.table[self.index].view(w * w, w * w, heads).permute(2, 0, 1).unsqueeze(0)
        mask = y.new_zeros((rows * columns, w * w, w * w))
        scores = scores.view(y.shape[0] // (rows * columns), rows * columns, heads, w * w, w * w) + mask[None, :, None]
        y = scores.view(-1, heads, w * w, w * w).softmax(-1) @ qkv[2]
        y = self.out(y.transpose(1, 2).reshape(y.shape[0], w * w, width))
        y = y.view(batch, rows, columns, w, w, width).permute(0, 1, 3, 2, 4, 5)
        y = torch.roll(y.reshape(batch, height + 1, wide + 1, width), (1, 1), (1, 2))[:, :height, :wide]
        x = F.pad(x + y, (0, 0, 0, 1, 0, 1))
        return self.merge(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)).mean((1, 2))


class Shuffle(nn.Module):
    """As ShuffleNet V2: halves by chunk, a shuffle by view with sizes, unlike parts by split."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.branch = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width // 2, width // 2, 3, padding=1)
        self.left, self.right = nn.Conv2d(4, 8, 1), nn.Conv2d(width - 4, 8, 1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.stem(x).chunk(2, 1)
        x = torch.cat([first, self.branch(second)], 1)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        left, right = x.split([4, channels - 4], 1)
        return self.fc(torch.cat([self.left(left), self.right(right)], 1).relu().mean((2, 3)))


class Gates(nn.Module):
    """GLU, halves by slices, PReLU, a norm of one channel each, a norm of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 32, 1), nn.Conv2d(16, 32, 1), nn.Conv2d(16, 12, 1)
        self.single, self.grouped = nn.GroupNorm(32, 32), nn.GroupNorm(4, 32)
        self.slopes, self.fc = nn.PReLU(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.single(self.first(x)), 1)
        x = self.grouped(self.second(x))
        x = x[:, :16] * x[:, 16:].sigmoid()
        return self.fc(self.slopes(self.third(x)).mean((2, 3)))


class Upwards(nn.Module):
    """PixelShuffle, a depthwise transposed convolution, a shortcut whose new channels are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(12, 12, 2, 2, groups=12), nn.Conv2d(12, 2, 1)
        self.twos = nn.ConvTranspose2d(12, 12, 1, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_shuffle(self.first(x), 2)
        x = F.pad(x, (0, 0, 0, 0, 2, 2)) + self.second(x).relu()
        return self.out(self.twos(self.up(x).relu()))


class Products(nn.Module):
    """einsum over heads, and what counts places: the largest of, sorted, the k first."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).reshape(*x.shape[:2], self.heads, -1) for p in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        x = x + self.o(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2))
        y = self.up(x).relu()
        return self.down(y + y.sort(1).values + y.max(1, keepdim=True)[0] + y.topk(2, 1)[0].mean(1, keepdim=True))


class Tagger(nn.Module):
    """A recurrent layer, whose widths stay, between others that shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.narrow = nn.Embedding(30, 12), nn.Linear(12, 20), nn.Linear(20, 8)
        self.lstm, self.hidden, self.out = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.narrow(self.wide(self.table(tokens)).relu())
        return self.out(self.hidden(self.lstm(x)[0]).relu())


class Volumes(nn.Module):
    """Convolutions and pools of three dimensions, and a mean over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Conv3d(2, 12, 3, padding=1), nn.Conv3d(12, 8, 1), nn.Conv3d(2, 1, 1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(self.first(x).relu(), 2)
        x = x * self.gate(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)).sigmoid()
        return self.fc(F.adaptive_avg_pool3d(self.second(x), 1).flatten(1))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True, norm_first=False), 1, None, False
    )


class Embedded(nn.Module):
    """nn.TransformerEncoder on embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(30, 24), encoder_layer(), nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.table(tokens)))


def tokens() -> Tensor:
    return torch.randint(0, 30, (2, 6))


TRAITS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, int]]] = {
    "heads in the source": (HeadsInTheSource, rows, {"q.weight": 4}),
    "width over heads": (WidthOverHeads, rows, {"q.weight": 4}),
    "one projection": (OneProjection, rows, {"bias": 4}),
    "windows": (Windows, lambda: image(6), {"embed.weight": 16, "qkv.weight": 2}),
    "shuffle": (Shuffle, image, {"stem.weight": 8, "left.weight": 8, "right.weight": 8}),
    "gates": (Gates, image, {"first.weight": 16, "second.weight": 8, "third.weight": 12}),
    "upwards": (Upwards, image, {"first.weight": 4}),
    "products": (Products, rows, {"q.weight": 4, "up.weight": 32}),
    "tagger": (Tagger, tokens, {"wide.weight": 20, "hidden.weight": 16}),
    "volumes": (Volumes, lambda: torch.randn(2, 2, 4, 4, 4), {"first.weight": 12, "second.weight": 8}),
    "encoder layer": (Embedded, tokens, {"body.layers.0.linear1.weight": 40, "table.weight": 24}),
}
"""Name → network, an input, and the units of some weights' output channels."""
