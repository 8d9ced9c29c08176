"""What images are compared by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agglo.embedded import classifier
from agglo.lab.cli import main
from agglo.lab.tasks.synthesis.evaluation.features import (
    ClassifierFeatures,
    InceptionFeatures,
    clean_resize,
    features_named,
    image_files,
    installed_inception,
    opened,
)
from agglo.lab.tasks.synthesis.evaluation.fid import (
    FewImagesWarning,
    Statistics,
    features_of,
    frechet_distance,
    statistics_of,
)
from tests.support.data import data_path

timm = pytest.importorskip("timm")
Image = pytest.importorskip("PIL.Image")


def an_image(seed: int, size: tuple[int, int] = (28, 28), colour: bool = False) -> Image.Image:
    shape = (*size[::-1], 3) if colour else size[::-1]
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def folder_of(path: Path, seeds: range) -> Path:
    path.mkdir()
    for seed in seeds:
        an_image(seed).save(path / f"{seed}.png")
    return path


def test_resizing_is_bicubic_and_antialiased_without_rounding() -> None:
    # Of middling brightness, so that bicubic's overshoot is nowhere cut off.
    large = an_image(0, (600, 450), colour=True).point(lambda value: 80 + value // 3)
    found = clean_resize(large)
    assert found.shape == (3, 299, 299) and found.dtype == torch.float32
    assert found.min() >= 0 and found.max() <= 255
    assert (found != found.round()).float().mean() > 0.9
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(np.asarray(large, dtype=np.float32)).permute(2, 0, 1)[None],
        (299, 299),
        mode="bicubic",
        antialias=True,
    )
    torch.testing.assert_close(found, theirs[0].clamp(0, 255), atol=0.1, rtol=0)
    assert torch.equal(clean_resize(an_image(1)), clean_resize(an_image(1).convert("RGB")))


def test_the_classifiers_features_are_what_its_head_reads() -> None:
    features = ClassifierFeatures()
    images = [an_image(seed) for seed in range(3)]
    model = timm.create_model(classifier.NAME, pretrained=True).eval()
    pixels = torch.stack([torch.from_numpy(np.asarray(image, dtype=np.float32)) for image in images])[:, None] / 255
    with torch.no_grad():
        expected = model((pixels - 0.2860) / 0.3530)
        torch.testing.assert_close(model.head(features(images)), expected)
    with pytest.raises(ValueError, match="an image of 30 x 28"):
        features([an_image(0, (30, 28))])


def test_inception_tells_images_apart() -> None:
    path = installed_inception() or data_path("inception/default_1.pt")
    features = InceptionFeatures(path)
    found = features([an_image(0, (64, 64), colour=True), an_image(0), an_image(1)])
    assert found.shape == (3, 2048) and (found >= 0).all()
    with torch.no_grad():
        alone = features.model(((clean_resize(an_image(1)) - 128) / 128)[None]).flatten(1)
    torch.testing.assert_close(found[2:], alone, atol=1e-4, rtol=1e-3)
    assert (found[1] - found[2]).norm() > 1e-3


def test_batches_do_not_matter() -> None:
    images = [an_image(seed) for seed in range(5)]
    features = ClassifierFeatures()
    one, other = (features_of(images, features, 5, batch_size=size) for size in (2, 5))
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_folders_and_files_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = folder_of(tmp_path / "a", range(8)), folder_of(tmp_path / "b", range(100, 106))
    classifier_features = ["--features", "classifier"]
    assert main(["fid", str(a), str(b), *classifier_features, "--keep", str(tmp_path / "a.npz")]) == 0
    told = capsys.readouterr()
    assert "8 images for 64 features" in told.err and "6 images for 64 features" in told.err
    features = ClassifierFeatures()
    expected = [Statistics.of(features(list(opened(image_files(side)))).double().numpy()) for side in (a, b)]
    with pytest.warns(FewImagesWarning):
        assert float(told.out) == pytest.approx(frechet_distance(*expected), abs=1e-3)
    assert main(["fid", str(tmp_path / "a.npz"), str(b), *classifier_features]) == 0
    assert capsys.readouterr().out == told.out
    assert main(["fid", str(tmp_path / "a.npz"), str(tmp_path / "a.npz")]) == 0  # needs no weights of Inception
    assert float(capsys.readouterr().out) == pytest.approx(0, abs=1e-3)


def test_what_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = str(tmp_path / "empty")
    Path(empty).mkdir()
    assert main(["fid", empty, str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["fid", empty, empty, "--features", "classifier"]) == 2
    assert "holds no images" in capsys.readouterr().err
    Path(empty, "no.png").write_bytes(b"no image")
    assert main(["fid", empty, empty, "--features", "classifier"]) == 2
    assert "no.png" in capsys.readouterr().err
    with pytest.raises(ValueError, match="features='pixels'"):
        features_named("pixels")
    with pytest.raises(ValueError, match="TorchScript"):
        features_named("inception", weights=Path(empty, "no.png"))
    with pytest.raises(ValueError, match="nothing to keep"):
        statistics_of(tmp_path / "a.npz", lambda: ClassifierFeatures(), keep=tmp_path / "b.npz")
