"""What does not go with merged tokens, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import agglo
from tests.support import vlms
from tests.support.vlms import VLM, VLMS

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LLAVA, GEMMA3, QWEN = VLMS[0], VLMS[3], VLMS[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_rate": 0.5, "output": "fewer"}, r"output='fewer' is not known; accepted: 'restored', 'merged'"),
        ({"threshold": 0.2, "output": "merged"}, r"threshold=0\.2 leaves another number of tokens of every picture"),
        ({"threshold": 0.2, "output": "merged late"}, r"threshold=0\.2 leaves another number"),
        ({"keep_rate": 0.5, "method": "ats", "output": "merged"}, "ats does not leave a number of tokens"),
        ({"keep_rate": 0.5, "output": "merged late", "blocks": (3,)}, r"blocks=\(3,\) is for a tower"),
        ({"keep_rate": 0.5, "output": "merged late", "acts": "before block", "features": "tokens"}, "acts='before"),
        ({"keep_rate": 0.5, "output": "merged late", "unread": "drop"}, "unread='drop' is for a tower"),
        ({"keep_rate": 0.5, "output": "merged late", "method": "sinkhorn"}, "sinkhorn learns for the tower's tokens"),
        ({"keep_rate": 0.5, "output": "merged late", "method": "evit"}, "evit asks what attention says"),
        ({"keep_rate": 0.5, "output": "merged late", "importance": "received"}, "atc asks what attention says"),
        ({"keep_rate": 0.3, "output": "merged late", "method": "tome"}, "tome"),
        ({"keep_rate": 0.5, "output": "smaller picture", "method": "tome"}, "it takes no method"),
        ({"keep_rate": 0.01, "output": "merged late"}, "at least 1 must stay"),
    ],
)  # fmt: skip
def test_impossible_wishes_raise_before_anything_changes(options: dict[str, Any], message: str) -> None:
    model = LLAVA.model()
    with pytest.raises(ValueError, match=message):
        agglo.apply(model, **options)
    assert not any("agglo" in name for module in model.modules() for name in vars(module))


def test_less_than_one_token_is_refused_where_the_connector_is_on_a_grid() -> None:
    with pytest.raises(ValueError, match=r"leaves 1 of 64 patches, which is less than one of the 16 tokens"):
        agglo.apply(GEMMA3.model(), keep_rate=0.25, output="merged")


def test_a_method_that_learns_cannot_merge_what_a_connector_gives() -> None:
    with pytest.raises(ValueError, match="sinkhorn learns"):
        agglo.apply(GEMMA3.model(), "sinkhorn", keep_rate=0.7, output="merged")


def test_other_models_are_refused() -> None:
    config = tf.ViTConfig(image_size=32, hidden_size=24, num_hidden_layers=4, num_attention_heads=2)
    with pytest.raises(agglo.UnsupportedModelError, match=r"ViTModel holds none.*supported.*LlavaModel.*Qwen3VLModel"):
        agglo.apply(tf.ViTModel(config), keep_rate=0.5, output="merged")


def test_a_layer_before_the_first_block_is_refused() -> None:
    model = vlms._llava(vision_feature_layer=0)
    with pytest.raises(agglo.UnsupportedModelError, match="before the first block"):
        agglo.apply(model, keep_rate=0.5, output="merged")


def test_a_class_of_somebody_else_is_refused() -> None:
    model = LLAVA.model()

    class Mine(type(model.model)):  # type: ignore[misc]
        def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
            return super().get_image_features(*args, **kwargs)

    model.model.__class__ = Mine
    with pytest.raises(agglo.UnsupportedModelError, match="Mine replaces transformers' get_image_features"):
        agglo.apply(model, keep_rate=0.5, output="merged late")


@pytest.mark.parametrize("dense", [0, True, 2.0])
def test_a_number_of_tokens_is_a_whole_one(dense: Any) -> None:
    model = agglo.apply(QWEN.model(), keep_rate=0.5, output="merged late")
    with pytest.raises(ValueError, match="whole number"):
        agglo.image_tokens(model, dense)


def test_a_fixed_number_is_not_asked_about_others() -> None:
    model = agglo.apply(LLAVA.model(), keep_rate=0.5, output="merged late")
    with pytest.raises(ValueError, match="every picture of this model takes 64 tokens"):
        agglo.image_tokens(model, 100)


@pytest.mark.parametrize(("vlm", "message"), [(GEMMA3, "Gemma3Model takes no smaller"), (QWEN, "its processor")])
def test_models_that_cannot_be_given_smaller_pictures(vlm: VLM, message: str) -> None:
    with pytest.raises(agglo.UnsupportedModelError, match=message):
        agglo.apply(vlm.model(), keep_rate=0.5, output="smaller picture")


def test_a_diffusion_model_takes_no_such_wish() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=2, num_layers=1, sample_size=4, norm_num_groups=1
    )
    with pytest.raises(ValueError, match="output='merged' is for"):
        agglo.apply(model, keep_rate=0.5, output="merged")
    assert torch.is_tensor(next(model.parameters()))
