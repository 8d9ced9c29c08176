"""torchvision's vision transformers become timm's, to the logit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agglo.models.opening import ModelSpec, build

torchvision = pytest.importorskip("torchvision")


@pytest.mark.parametrize("old", [False, True], ids=["today's names", "names of old files"])
def test_same_logits(tmp_path: Path, old: bool) -> None:
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    theirs = VisionTransformer(image_size=48, patch_size=16, num_layers=12, num_heads=12, hidden_dim=768, mlp_dim=3072)
    theirs.eval()
    torch.nn.init.normal_(theirs.heads.head.weight)  # all zero otherwise, and every logit with it
    state = theirs.state_dict()
    if old:
        state = {n.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for n, v in state.items()}
    torch.save(state, tmp_path / "swag.pth")
    ours = build(ModelSpec("vit_base_patch16_224", tmp_path / "swag.pth", options={"img_size": 48}))
    pixels = torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        assert torch.allclose(ours(pixels), theirs(pixels), atol=1e-4)
