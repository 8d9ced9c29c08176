"""A host for a library of one's own, written by what hosts/vit/base.py says: the contract holds for it too."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import agglo
from agglo.hosts import registry
from agglo.hosts.common.base import Host, Layout, matrix_entries
from agglo.hosts.common.blocks import Parts, Projected
from agglo.hosts.common.loop import Given, Loop
from agglo.hosts.common.swap import PassSetup, ReducedModule, begins_pass
from agglo.testing import HostContract

WIDTH, HEADS, SIDE, PATCH = 24, 3, 8, 8


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (
            linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + cast(Tensor, self.mlp(self.between(x)))


class OwnEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnBlock() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OwnViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 1 + SIDE**2, WIDTH))
        self.encoder = OwnEncoder()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(image), -1, -1), patches], dim=1) + self.positions
        return cast(Tensor, self.head(self.encoder(x).mean(dim=1)))


class OwnParts(Parts):
    def whole(self, block: Any, x: Tensor, rotary: Tensor | None) -> Tensor:
        return cast(Tensor, block(x))

    def project(self, block: Any, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        y = block.before(x)
        q, k, v = (
            linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (block.query, block.key, block.value)
        )
        return Projected(q, k, v)

    def join(self, block: Any, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        return x + cast(Tensor, block.out(attended.transpose(1, 2).flatten(2)))

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + cast(Tensor, block.mlp(block.between(x)))


class OwnLoop(Loop):
    blocks_name = "layers"

    def parts(self, block: nn.Module, given: Given) -> Parts:
        return OwnParts()


class ReducedOwnEncoder(ReducedModule):
    @begins_pass
    def forward(self: Any, setup: PassSetup, *args: Any, **kwargs: Any) -> Any:
        return OwnLoop(self, setup).call("forward", *args, **kwargs)


class OwnHost(Host):
    model_classes: ClassVar[tuple[str, ...]] = (f"{__name__.split('.')[0]}.OwnViT",)

    def check(self, module: Any) -> None:
        for layer in module.encoder.layers:
            if not isinstance(layer, OwnBlock):
                raise agglo.UnsupportedModelError(f"built from {type(layer).__name__}; supported: OwnBlock")

    def layout(self, module: Any) -> Layout:
        block = module.encoder.layers[0]
        return Layout(
            depth=len(module.encoder.layers),
            prefix=1,
            patches=SIDE**2,
            attention_weights=matrix_entries(block.query, block.key, block.value, block.out),
            attention_width=WIDTH,
            mlp_weights=matrix_entries(block.mlp),
            width=WIDTH,
            heads=HEADS,
            grid=(SIDE, SIDE),
        )

    def loop(self, module: Any) -> nn.Module:
        return cast(nn.Module, module.encoder)

    def mixin(self, module: nn.Module) -> type[ReducedModule]:
        return ReducedOwnEncoder


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HOSTS", (*registry.HOSTS, OwnHost()))


class TestOwnHost(HostContract):
    def model(self) -> nn.Module:
        return OwnViT()


def test_what_the_check_refuses() -> None:
    model = OwnViT()
    model.encoder.layers[3] = nn.Identity()
    with pytest.raises(agglo.UnsupportedModelError, match="built from Identity; supported: OwnBlock"):
        agglo.apply(model, keep_rate=0.5)
    with pytest.raises(agglo.UnsupportedModelError, match=r"supported: .*tests\.OwnViT"):
        agglo.apply(nn.Linear(2, 2), keep_rate=0.5)
