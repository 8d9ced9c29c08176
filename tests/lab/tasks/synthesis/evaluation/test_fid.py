"""The Frechet distance against other computations of it, and the features that images are compared by."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import linalg
from torchmetrics.image.fid import _compute_fid

from agglo.embedded import classifier
from agglo.lab.cli import main
from agglo.lab.tasks.synthesis.evaluation.fid import (
    FewImagesWarning,
    Statistics,
    classifier_features,
    clean_resize,
    features_named,
    frechet_distance,
    image_files,
    inception_features,
    installed_inception,
    opened,
)
from tests.support.data import data_path


def statistics(seed: int, count: int, dimensions: int, scale: float = 1.0, shift: float = 0.0) -> Statistics:
    random = np.random.default_rng(seed)
    mixing = random.standard_normal((dimensions, dimensions))
    return Statistics.of(scale * random.standard_normal((count, dimensions)) @ mixing + shift)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 24), st.floats(0.1, 3), st.floats(-2, 2))
def test_as_scipy_and_torchmetrics_compute_it(seed: int, dimensions: int, scale: float, shift: float) -> None:
    a = statistics(seed, 3 * dimensions + 1, dimensions)
    b = statistics(seed + 1, 2 * dimensions + 1, dimensions, scale, shift)
    root = np.real(linalg.sqrtm(a.covariance @ b.covariance))
    apart = a.mean - b.mean
    expected = apart @ apart + np.trace(a.covariance + b.covariance - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-6)
    theirs = _compute_fid(*(torch.from_numpy(x) for x in (a.mean, a.covariance, b.mean, b.covariance)))
    assert frechet_distance(a, b) == pytest.approx(float(theirs), rel=1e-6)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6 * np.trace(a.covariance))


def test_fewer_images_than_features_are_told_with_their_number() -> None:
    few, many = statistics(0, 5, 8), statistics(1, 100, 8)
    with pytest.warns(FewImagesWarning, match="5 images for 8 features"):
        distance = frechet_distance(few, many)
    # Exact all the same: the nonzero eigenvalues of S1 S2 by another way.
    values = np.linalg.eigvals(few.covariance @ many.covariance)
    apart = few.mean - many.mean
    expected = apart @ apart + np.trace(few.covariance + many.covariance) - 2 * np.sqrt(values.real.clip(min=0)).sum()
    assert distance == pytest.approx(expected, rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frechet_distance(many, many)


def test_statistics_in_a_file(tmp_path: Path) -> None:
    found = statistics(0, 50, 3)
    found.save(tmp_path / "some.npz")
    again = Statistics.load(tmp_path / "some.npz")
    assert again.count == 50
    assert np.array_equal(again.mean, found.mean) and np.array_equal(again.covariance, found.covariance)
    np.savez(tmp_path / "theirs.npz", mu=found.mean, sigma=found.covariance)
    assert Statistics.load(tmp_path / "theirs.npz").count is None
    np.savez(tmp_path / "other.npz", mu=found.mean)
    with pytest.raises(ValueError, match="holds no statistics"):
        Statistics.load(tmp_path / "other.npz")


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
    features = classifier_features()
    images = [an_image(seed) for seed in range(3)]
    model = timm.create_model(classifier.NAME, pretrained=True).eval()
    pixels = torch.stack([torch.from_numpy(np.asarray(image, dtype=np.float32)) for image in images])[:, None] / 255
    with torch.no_grad():
        expected = model((pixels - 0.2860) / 0.3530)
        torch.testing.assert_close(model.head(features(images)), expected)
    with pytest.raises(ValueError, match="an image of 30 x 28"):
        features([an_image(0, (30, 28))])


def test_inception_tells_images_apart() -> None:
    features = inception_features(installed_inception() or data_path("inception/default_1.pt"))
    found = features([an_image(0), an_image(1)])
    assert found.shape == (2, 2048) and (found >= 0).all()
    torch.testing.assert_close(found[1:], features([an_image(1)]), atol=1e-4, rtol=1e-3)
    assert (found[0] - found[1]).norm() > 1e-3


def test_folders_and_files_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = folder_of(tmp_path / "a", range(8)), folder_of(tmp_path / "b", range(100, 106))
    how = ["--features", "classifier", "--batch-size", "5"]
    assert main(["fid", str(a), str(b), *how, "--keep", str(tmp_path / "a.npz")]) == 0
    told = capsys.readouterr()
    assert "8 images for 64 features" in told.err and "6 images for 64 features" in told.err
    features = classifier_features()
    expected = [Statistics.of(features(list(opened(image_files(side)))).double().numpy()) for side in (a, b)]
    with pytest.warns(FewImagesWarning):
        assert float(told.out) == pytest.approx(frechet_distance(*expected), abs=1e-3)
    assert main(["fid", str(tmp_path / "a.npz"), str(b), *how]) == 0
    assert capsys.readouterr().out == told.out
    assert main(["fid", str(tmp_path / "a.npz"), str(b), *how, "--keep", str(tmp_path / "b.npz")]) == 2
    assert main(["fid", str(a), str(b), *how, "--weights", str(tmp_path / "a.npz")]) == 2
    errors = capsys.readouterr().err
    assert "--keep" in errors and "weights=" in errors


def test_what_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = str(tmp_path / "empty")
    Path(empty).mkdir()
    for other, message in ((str(tmp_path / "absent"), "does not exist"), (empty, "holds no images"), (empty, "no.png")):
        assert main(["fid", empty, other, "--features", "classifier"]) == 2
        assert message in capsys.readouterr().err
        if message == "holds no images":
            Path(empty, "no.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="features='pixels'"):
        features_named("pixels")
    with pytest.raises(ValueError, match="TorchScript"):
        features_named("inception", weights=Path(empty, "no.png"))
