"""Files of pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from agglo.experiments.image_files import require_image_name


def test_a_path_of_no_picture_is_refused(tmp_path: Path) -> None:
    assert require_image_name(tmp_path / "a.gif") == tmp_path / "a.gif"
    with pytest.raises(ValueError, match="is no image file"):
        require_image_name(tmp_path / "a.txt")
