"""The model families that are tested, one tiny random configuration each. docs/hosts.md lists them from here:

python -m tests.support.families        # writes the table
"""

# ruff: noqa: E501 a family is a line
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
BEGIN, END = "<!-- families: python -m tests.support.families -->", "<!-- end of families -->"


@dataclass(frozen=True)
class Family:
    """A family of a library's models.

    names: what people call it. cls: the class that is tested. build: makes one. run: its outputs for a batch.
    layout: how its layers and tokens are special, in words; "" for a plain vision transformer.
    """

    library: str
    names: str
    cls: str
    build: Callable[[], nn.Module]
    run: Callable[[Any, Tensor], Any]
    layout: str = ""
    batch: Callable[[], Tensor] | None = None

    @property
    def id(self) -> str:
        return f"{self.library}-{self.cls}"

    def inputs(self) -> Tensor:
        """A batch of images, or whatever the model takes."""
        return images() if self.batch is None else self.batch()

    def fresh(self) -> Any:
        """A model with random weights, none of them so small that a branch would not matter."""
        torch.manual_seed(0)
        model = self.build().eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return model


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


images = partial(random, 2, 3, 32, 32)
clips = partial(random, 2, 4, 3, 32, 32)  # of four frames
patches = partial(random, 40, 3 * 2 * 4 * 4)
wide_patches = partial(random, 16 * 20 + 10 * 12, 3 * 2 * 4 * 4)
siglip2_patches = partial(random, 2, 16, 3 * 8 * 8)
frames = partial(random, 2 * 4, 3, 32, 32)
spectrograms = partial(random, 2, 64, 32)
tiles = partial(random, 2, 1, 4, 3, 32, 32)
naflex_patches = partial(random, 2, 16, 3 * 8 * 8)


def tf() -> Any:
    return importlib.import_module("transformers")


SIZE = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
SMALL = {**SIZE, "intermediate_size": 40, "image_size": 32, "patch_size": 8}
DINO = {**SIZE, "image_size": 32, "patch_size": 8, "layerscale_value": 0.5}
TEXT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def everything(model: Any, x: Tensor) -> Any:
    return model(x, output_hidden_states=True)


def plainly(model: Any, x: Tensor) -> Any:
    return model(x)


def pixels(model: Any, x: Tensor) -> Any:
    return model(pixel_values=x, output_hidden_states=True)


def hf(
    names: str,
    cls: str,
    config: str,
    options: dict[str, Any] | None = None,
    run: Callable[[Any, Tensor], Any] = everything,
    layout: str = "",
    batch: Callable[[], Tensor] | None = None,
) -> Family:
    def build() -> nn.Module:
        library = tf()
        return getattr(library, cls)(getattr(library, config)(**(SMALL if options is None else options)))  # type: ignore[no-any-return]

    return Family("transformers", names, cls, build, run, layout, batch)


def module(name: str, cls: str) -> Any:
    """A class that transformers does not export."""
    return getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), cls)


def inner(
    names: str, folder: str, cls: str, config: str, options: dict[str, Any], run: Any = everything, **more: Any
) -> Family:
    """A tower that transformers does not export by itself."""

    def build() -> nn.Module:
        configs = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
        return module(folder, cls)(getattr(configs, config)(**options))  # type: ignore[no-any-return]

    return Family("transformers", names, cls, build, run, **more)


# Two images of different sizes, as packed patches: 4 x 6 and 4 x 4 of them.
GRIDS = torch.tensor([[1, 4, 6], [1, 4, 4]])


def packed(model: Any, x: Tensor) -> Any:
    output = model(x, grid_thw=GRIDS)
    return output.last_hidden_state, output.pooler_output, output.get("deepstack_features")


def windowed(model: Any, x: Tensor) -> Any:
    """Windows of 8 x 8 patches, some of them cut off at the border."""
    output = model(x, grid_thw=torch.tensor([[1, 16, 20], [1, 10, 12]]))
    return output.last_hidden_state, output.pooler_output


def siglip2(model: Any, x: Tensor) -> Any:
    """The second image is padded from 12 patches to 16."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    output = model(x, pixel_attention_mask=mask, spatial_shapes=torch.tensor([[4, 4], [3, 4]]))
    return output.last_hidden_state[mask.bool()], output.pooler_output


def padded_images(model: Any, x: Tensor) -> Any:
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[1, :, 3:] = False
    return model(x, patch_attention_mask=mask).last_hidden_state[mask.flatten(1)]


def pixtral(model: Any, x: Tensor) -> Any:
    return model(x, image_sizes=torch.tensor([[32, 32], [24, 32]]), output_hidden_states=True)


def clipseg(model: Any, x: Tensor) -> Any:
    ids = torch.tensor([[1, 5, 9, 49], [3, 7, 2, 49]])
    return model(pixel_values=x, input_ids=ids).logits


def build_trocr() -> nn.Module:
    library = tf()
    decoder = library.TrOCRConfig(
        vocab_size=50, d_model=24, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32,
        cross_attention_hidden_size=24,
    )  # fmt: skip
    return library.VisionEncoderDecoderModel(  # type: ignore[no-any-return]
        encoder=library.ViTModel(library.ViTConfig(**SMALL)), decoder=library.TrOCRForCausalLM(decoder)
    )


def prompted(model: Any, x: Tensor) -> Any:
    """An answer to a prompt with one image of 16 tokens."""
    ids = torch.tensor([[1] + [59] * 16 + [5, 7]]).repeat(len(x), 1)
    more = {"token_type_ids": (ids == 59).long()} if "Gemma" in type(model).__name__ else {}
    return model(input_ids=ids, pixel_values=x, use_cache=False, attention_mask=torch.ones_like(ids), **more).logits


def transcribed(model: Any, x: Tensor) -> Any:
    return model(pixel_values=x, decoder_input_ids=torch.tensor([[1, 2, 3]]).repeat(len(x), 1)).logits


LANGUAGE = {**TEXT, "vocab_size": 60, "num_key_value_heads": 1}
SIGLIP = {"model_type": "siglip_vision_model", **SMALL, "vision_use_head": False}
NECK = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}
BEIT = {**SMALL, "use_relative_position_bias": True, "drop_path_rate": 0.0}
QWEN = {"depth": 4, "patch_size": 4, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
RELATIVE = "relative position bias: a merged token takes the size-weighted mean of its members' rows and columns"
ROTARY = "rotary positions: a merged token sits at the size-weighted mean position of its members"
FUSED = "one fused projection to q, k and v"
NESTED = "nested attention"
PACKED = "images of any size, packed: each is reduced by its own number of patches"
PADDED = "padded images: padding takes no part once tokens are reduced"

MLLAMA = {
    "hidden_size": 24, "num_hidden_layers": 4, "num_global_layers": 1, "attention_heads": 2, "intermediate_size": 40,
    "image_size": 32, "patch_size": 8, "max_num_tiles": 4, "intermediate_layers_indices": [1, 2],
    "vision_output_dim": 72, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [2, 2]],
}  # fmt: skip


def tiled(model: Any, x: Tensor) -> Any:
    """The second image has two of four tiles."""
    mask = torch.tensor([[[1, 1, 1, 1]], [[1, 1, 0, 0]]])
    output = model(x, aspect_ratio_ids=torch.tensor([[4], [2]]), aspect_ratio_mask=mask)
    return output.last_hidden_state


TRANSFORMERS: tuple[Family, ...] = (
    hf("ViT", "ViTForImageClassification", "ViTConfig"),
    hf("DeiT", "DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    hf("ViT-MAE", "ViTMAEModel", "ViTMAEConfig", {**SMALL, "mask_ratio": 0.0}, lambda model, x: model(x, noise=torch.zeros(2, 16)).last_hidden_state),
    hf("ViT-MSN", "ViTMSNModel", "ViTMSNConfig"),
    hf("I-JEPA", "IJepaModel", "IJepaConfig"),
    hf("BEiT", "BeitForImageClassification", "BeitConfig", BEIT, layout=RELATIVE),
    hf("BEiT", "BeitModel", "BeitConfig", {**BEIT, "use_relative_position_bias": False, "use_shared_relative_position_bias": True}, layout=RELATIVE),
    hf("Data2Vec", "Data2VecVisionForImageClassification", "Data2VecVisionConfig", BEIT, layout=RELATIVE),
    hf("Data2Vec", "Data2VecVisionModel", "Data2VecVisionConfig", {**BEIT, "use_shared_relative_position_bias": True}, layout=RELATIVE),
    hf("DINOv2", "Dinov2Model", "Dinov2Config", DINO),
    hf("DINOv2 with registers", "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {**DINO, "num_register_tokens": 3}, layout="register tokens are never merged"),
    hf("DINOv3", "DINOv3ViTModel", "DINOv3ViTConfig", {**SMALL, "num_register_tokens": 3}, layout=ROTARY),
    hf("CLIP", "CLIPVisionModel", "CLIPVisionConfig"),
    hf("SigLIP", "SiglipVisionModel", "SiglipVisionConfig"),
    hf("SigLIP 2", "Siglip2VisionModel", "Siglip2VisionConfig", {**SIZE, "intermediate_size": 40, "patch_size": 8, "num_patches": 16}, siglip2, PADDED, siglip2_patches),
    hf("AltCLIP", "AltCLIPVisionModel", "AltCLIPVisionConfig"),
    hf("Chinese-CLIP", "ChineseCLIPVisionModel", "ChineseCLIPVisionConfig"),
    hf("MetaCLIP 2", "MetaClip2VisionModel", "MetaClip2VisionConfig"),
    hf("CLIPSeg", "CLIPSegForImageSegmentation", "CLIPSegConfig", {"vision_config": SMALL, "text_config": TEXT, "extract_layers": [1, 2, 3], "reduce_dim": 8, "projection_dim": 16, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16}, clipseg),
    hf("X-CLIP", "XCLIPVisionModel", "XCLIPVisionConfig", {**SMALL, "num_frames": 4, "mit_hidden_size": 16, "mit_num_attention_heads": 2, "mit_intermediate_size": 16}, layout="a message token per frame is asked, and never merged", batch=frames),
    hf("OWL-ViT", "OwlViTVisionModel", "OwlViTVisionConfig", run=pixels),
    hf("OWLv2", "Owlv2VisionModel", "Owlv2VisionConfig", run=pixels),
    hf("YOLOS", "YolosForObjectDetection", "YolosConfig", {**SMALL, "image_size": [32, 32], "num_detection_tokens": 5}, layout="detection tokens at the end are never merged; position embeddings are added between layers"),
    hf("DPT", "DPTForDepthEstimation", "DPTConfig", {**SMALL, **NECK, "backbone_out_indices": [0, 1, 2, 3]}, layout=NESTED),
    hf("Depth Anything", "DepthAnythingForDepthEstimation", "DepthAnythingConfig", {**NECK, "backbone_config": {"model_type": "dinov2", **DINO, "out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False}, "patch_size": 8, "reassemble_hidden_size": 24, "head_hidden_size": 4}),
    hf("ViTPose", "VitPoseForPoseEstimation", "VitPoseConfig", {"backbone_config": {"model_type": "vitpose_backbone", **SIZE, "image_size": (32, 32), "patch_size": (8, 8), "mlp_ratio": 2, "out_features": ["stage4"]}, "num_labels": 3}, lambda model, x: model(x).heatmaps, NESTED),
    hf("EoMT", "EomtForUniversalSegmentation", "EomtConfig", {**DINO, "num_blocks": 2, "num_queries": 5, "mlp_ratio": 2, "num_register_tokens": 2, "num_upscale_blocks": 1}, lambda model, x: (model(x).masks_queries_logits, model(x).class_queries_logits), "queries that join between layers are never merged"),
    hf("VideoMAE", "VideoMAEModel", "VideoMAEConfig", {**SMALL, "num_frames": 4, "tubelet_size": 2}, layout=NESTED, batch=clips),
    hf("ViViT", "VivitModel", "VivitConfig", {**{k: v for k, v in SMALL.items() if k != "patch_size"}, "num_frames": 4, "tubelet_size": (2, 8, 8)}, batch=clips),
    hf("TimeSformer (joint)", "TimesformerModel", "TimesformerConfig", {**SMALL, "num_frames": 4, "attention_type": "joint_space_time"}, layout=FUSED, batch=clips),
    hf("V-JEPA 2", "VJEPA2Model", "VJEPA2Config", {**SIZE, "patch_size": 8, "crop_size": 32, "frames_per_clip": 4, "mlp_ratio": 2.0, "pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}, lambda model, x: model(x, skip_predictor=True).last_hidden_state, ROTARY, clips),
    hf("AST (audio)", "ASTModel", "ASTConfig", {**SIZE, "intermediate_size": 40, "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 64, "num_mel_bins": 32}, batch=spectrograms),
    hf("BLIP", "BlipVisionModel", "BlipVisionConfig", layout=FUSED),
    hf("BLIP-2", "Blip2VisionModel", "Blip2VisionConfig", layout=FUSED),
    hf("InstructBLIP", "InstructBlipVisionModel", "InstructBlipVisionConfig", layout=FUSED),
    hf("AIMv2", "Aimv2VisionModel", "Aimv2VisionConfig"),
    hf("MLCD", "MLCDVisionModel", "MLCDVisionConfig", layout=ROTARY),
    hf("RADIO", "RadioModel", "RadioConfig", {**SIZE, "image_size": 32, "patch_size": 8, "mlp_ratio": 2.0, "max_img_size": 64, "num_registers": 3}, plainly),
    Family("transformers", "TrOCR and other encoder-decoders", "VisionEncoderDecoderModel", build_trocr, transcribed),
    hf("LLaVA", "LlavaForConditionalGeneration", "LlavaConfig", {"vision_config": {"model_type": "clip_vision_model", **SMALL}, "text_config": {"model_type": "llama", **LANGUAGE, "num_key_value_heads": 2}, "image_token_id": 59, "image_seq_length": 16}, prompted),
    hf("PaliGemma", "PaliGemmaForConditionalGeneration", "PaliGemmaConfig", {"vision_config": {**SIGLIP, "projection_dim": 24}, "text_config": {"model_type": "gemma", **LANGUAGE, "head_dim": 12}, "image_token_index": 59, "projection_dim": 24, "hidden_size": 24}, prompted),
    hf("Gemma 3", "Gemma3ForConditionalGeneration", "Gemma3Config", {"vision_config": SIGLIP, "text_config": {**LANGUAGE, "head_dim": 12}, "mm_tokens_per_image": 16, "image_token_id": 59}, prompted),
    inner("Idefics2", "idefics2", "Idefics2VisionTransformer", "Idefics2VisionConfig", SMALL, padded_images, layout=PADDED),
    inner("Idefics3", "idefics3", "Idefics3VisionTransformer", "Idefics3VisionConfig", SMALL, padded_images, layout=PADDED),
    inner("SmolVLM", "smolvlm", "SmolVLMVisionTransformer", "SmolVLMVisionConfig", SMALL, padded_images, layout=PADDED),
    hf("InternVL", "InternVLVisionModel", "InternVLVisionConfig", {**SMALL, "image_size": (32, 32), "patch_size": (8, 8), "use_qk_norm": True}),
    inner("Mllama", "mllama", "MllamaVisionModel", "MllamaVisionConfig", MLLAMA, tiled, layout="class tokens and padding of its tiles are never merged; its global layers stay as they are", batch=tiles),
    hf("Pixtral", "PixtralVisionModel", "PixtralVisionConfig", None, pixtral, f"{PACKED}; {ROTARY}"),
    inner("Qwen2-VL", "qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", {**QWEN, "embed_dim": 24, "hidden_size": 32}, packed, layout=f"{PACKED}; {ROTARY}", batch=patches),
    inner("Qwen2.5-VL", "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig", {**QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32, "window_size": 32, "fullatt_block_indexes": [1, 3]}, windowed, layout="windows: tokens merge within theirs, and layers that attend further see all windows", batch=wide_patches),
    hf("Qwen3-VL", "Qwen3VLVisionModel", "Qwen3VLVisionConfig", {**QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2]}, packed, f"{PACKED}; {ROTARY}", patches),
)  # fmt: skip

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2, "num_classes": 5}


def timm(folder: str, cls: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models = importlib.import_module(f"timm.models.{folder}")
        chosen = {name: getattr(models, value) if name == "block_fn" else value for name, value in options.items()}
        return getattr(models, cls)(**{**TINY, **chosen})  # type: ignore[no-any-return]

    return build


def build_naflex() -> nn.Module:
    models = importlib.import_module("timm.models.naflexvit")
    config = models.NaFlexVitCfg(
        patch_size=8, embed_dim=24, depth=4, num_heads=2, pos_embed_grid_size=(4, 4), reg_tokens=1
    )
    return models.NaFlexVit(config, num_classes=5)  # type: ignore[no-any-return]


def naflex(model: Any, x: Tensor) -> Any:
    """The second image is padded from 12 patches to 16."""
    coordinates = torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(2, 1, 1)
    valid = torch.ones(2, 16, dtype=torch.bool)
    valid[1, 12:] = False
    return model({"patches": x, "patch_coord": coordinates, "patch_valid": valid})


def build_vitamin() -> nn.Module:
    from timm.layers import HybridEmbed
    from timm.models import vitamin
    from timm.models.vision_transformer import VisionTransformer

    convolutions = vitamin.VitConvCfg(norm_layer="layernorm2d")
    stages = vitamin.VitCfg(
        embed_dim=(8, 16, 24), depths=(1, 1, 1), stem_width=8, conv_cfg=convolutions, head_type="1d"
    )
    backbone = vitamin.MbConvStages(cfg=stages)
    return VisionTransformer(
        img_size=64, patch_size=16, embed_dim=24, depth=4, num_heads=2, num_classes=5, class_token=False, global_pool="avg",
        mlp_layer=vitamin.GeGluMlp, embed_layer=lambda **options: HybridEmbed(backbone, proj=False, **{**options, "patch_size": 1}),
    )  # fmt: skip


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(  # type: ignore[no-any-return]
        image_size=32, patch_size=8, num_layers=4, num_heads=2, hidden_dim=24, mlp_dim=40, num_classes=5
    )


def open_clip_vit() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(  # type: ignore[no-any-return]
        image_size=32, patch_size=8, width=24, layers=4, heads=2, mlp_ratio=2.0, output_dim=16
    )


TIMM: tuple[Family, ...] = (
    Family("timm", "ViT, DeiT, AugReg, MAE, DINOv2, CLIP, SigLIP", "VisionTransformer", timm("vision_transformer", "VisionTransformer", init_values=0.5), plainly),
    Family("timm", "ViT with parallel branches", "ParallelThingsBlock", timm("vision_transformer", "VisionTransformer", block_fn="ParallelThingsBlock"), plainly, "the attentions of a block are one of all their heads"),
    Family("timm", "EVA-02, DINOv3, Perception Encoder", "Eva", timm("eva", "Eva", use_rot_pos_emb=True), plainly, ROTARY),
    Family("timm", "BEiT, BEiTv2", "Beit", timm("beit", "Beit", use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.5), plainly, RELATIVE),
    Family("timm", "BEiT, pre-training", "Beit, shared bias", timm("beit", "Beit", use_shared_rel_pos_bias=True), plainly, RELATIVE),
    Family("timm", "CaiT", "Cait", timm("cait", "Cait", init_values=0.5), plainly, "heads that talk; the class token comes after the reduced blocks"),
    Family("timm", "NaFlexViT", "NaFlexVit", build_naflex, plainly, "with images of one size"),
    Family("timm", "NaFlexViT", "NaFlexVit, padded", build_naflex, naflex, PADDED, naflex_patches),
    Family("timm", "ViTamin", "VisionTransformer, hybrid", build_vitamin, plainly, "its transformer stage; convolutions before it stay as they are", lambda: random(2, 3, 64, 64)),
)  # fmt: skip

OTHERS: tuple[Family, ...] = (
    Family("torchvision", "ViT", "VisionTransformer", torchvision_vit, plainly),
    Family("open_clip", "CLIP and its kin", "VisionTransformer", open_clip_vit, plainly),
)

FAMILIES: tuple[Family, ...] = TRANSFORMERS + TIMM + OTHERS


def rows() -> Iterator[str]:
    """The table of docs/hosts.md."""
    yield "| library | family | tested with | what is special |"
    yield "|---|---|---|---|"
    for family in FAMILIES:
        yield f"| {family.library} | {family.names} | `{family.cls}` | {family.layout} |"


def page(text: str) -> str:
    """The page with the table of now between its marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return "\n".join([before + BEGIN, *rows(), END + after])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(FAMILIES)} families in {PAGE.name}")
