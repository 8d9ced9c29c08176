"""The checkpoints that ViT-Adapter's, SViT's and ATC's authors publish, under MMDetection's names.

Three kinds exist. Dense detectors name a block's layers as timm does. SViT's are PyTorch's encoder layers
(`self_attn.in_proj_weight`, `linear1`, ...), whose layer norms have another epsilon, and hold the gates besides. ATC's
carry a class token, a last norm and a head that nothing uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

ENCODER_LAYER = "TransformerEncoderLayer"
ENCODER_LAYER_EPS = 1e-5  # of SViT's layer norms; DeiT's have 1e-6
_POSITIONS = "backbone.pos_embed"
_UNUSED = re.compile(r"^backbone\.((norm|fc_norm|head)\.(weight|bias)|cls_token)$")

# Ours to theirs, in order: every rule that is found applies.
_RULES = (
    (r"^backbone\.vit\.", "backbone."),
    (r"^backbone\.level_embedding$", "backbone.level_embed"),
    (r"^backbone\.prior\.stem\.", "backbone.spm.stem."),
    *((rf"^backbone\.prior\.stages\.{i}\.", f"backbone.spm.conv{i + 2}.") for i in range(3)),
    *((rf"^backbone\.prior\.projections\.{i}\.", f"backbone.spm.fc{i + 1}.") for i in range(4)),
    *((rf"^backbone\.norms\.{i}\.", f"backbone.norm{i + 1}.") for i in range(4)),
    (r"(?<=\.injector\.)norm_tokens\.|(?<=\.extractors\.\d\.)norm_pyramid\.", "query_norm."),
    (r"(?<=\.injector\.)norm_pyramid\.|(?<=\.extractors\.\d\.)norm_tokens\.", "feat_norm."),
    (r"\.norm_ffn\.", ".ffn_norm."),
    (r"\.attention\.offsets\.", ".attn.sampling_offsets."),
    (r"\.attention\.weights\.", ".attn.attention_weights."),
    (r"\.attention\.value\.", ".attn.value_proj."),
    (r"\.attention\.out\.", ".attn.output_proj."),
    (r"\.ffn\.enter\.", ".ffn.fc1."),
    (r"\.ffn\.convolution\.", ".ffn.dwconv.dwconv."),
    (r"\.ffn\.leave\.", ".ffn.fc2."),
    (r"\.extractors\.0\.", ".extractor."),
    *((rf"\.extractors\.{i}\.", f".extra_extractors.{i - 1}.") for i in (1, 2)),
    (r"^neck\.pyramid\.inner_blocks\.(\d)\.0\.", r"neck.lateral_convs.\1.conv."),
    (r"^neck\.pyramid\.layer_blocks\.(\d)\.0\.", r"neck.fpn_convs.\1.conv."),
    (r"^rpn\.conv\.", "rpn_head.rpn_conv."),
    (r"^rpn\.objectness\.", "rpn_head.rpn_cls."),
    (r"^rpn\.differences\.", "rpn_head.rpn_reg."),
    *((rf"^roi\.box\.fc{i}\.", f"roi_head.bbox_head.shared_fcs.{i - 1}.") for i in (1, 2)),
    (r"^roi\.box\.classes\.", "roi_head.bbox_head.fc_cls."),
    (r"^roi\.box\.differences\.", "roi_head.bbox_head.fc_reg."),
    (r"^roi\.mask\.convs\.(\d)\.", r"roi_head.mask_head.convs.\1.conv."),
    (r"^roi\.mask\.up\.", "roi_head.mask_head.upsample."),
    (r"^roi\.mask\.logits\.", "roi_head.mask_head.conv_logits."),
)
_ENCODER_RULES = (
    (r"^(backbone\.blocks\.\d+\.)", rf"\1{ENCODER_LAYER}."),
    (r"\.attn\.qkv\.", ".self_attn.in_proj_"),
    (rf"(?<={ENCODER_LAYER})\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.fc1\.", ".linear1."),
    (r"\.mlp\.fc2\.", ".linear2."),
)
_GATES = (("agglo_method.gates", "selective_modules"), ("decide.0", "mlp.fc1"), ("decide.2", "mlp.fc2"))  # ours, theirs
_GATE = re.compile(r"^backbone\.selective_modules\.(\d+)\.(norm|mlp\.fc1|mlp\.fc2)\.(weight|bias)$")


def gates(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return SViT's gates of a published state dict, for after `agglo.apply`; empty for other detectors."""
    found = {name: value for name, value in state.items() if _GATE.match(name)}
    for ours, theirs in _GATES:
        found = {name.replace(theirs, ours): value for name, value in found.items()}
    return found


def from_published(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a published state dict for the detector whose state dict is `own`.

    What no detector has a use for is left out: a last norm, a head, and, unless it has one, the class token with its
    position. Any other tensor that the detector does not have keeps its published name.
    """
    encoder_layers = any(ENCODER_LAYER in name for name in state)
    ours_of = {published_name(name, encoder_layers): name for name in own}
    unused = {name for name in state if name not in ours_of and (_UNUSED.match(name) or _GATE.match(name))}
    found = {ours_of.get(name, name): value for name, value in state.items() if name not in unused}
    if (positions := ours_of.get(_POSITIONS)) in found and found[positions].shape[1] == own[positions].shape[1] + 1:
        found[positions] = found[positions][:, 1:]
    return found


def published_name(name: str, encoder_layers: bool = False) -> str:
    """Return the authors' name of a tensor; encoder_layers names the blocks as SViT does."""
    for pattern, replacement in (*_RULES, *(_ENCODER_RULES if encoder_layers else ())):
        name = re.sub(pattern, replacement, name)
    return name
