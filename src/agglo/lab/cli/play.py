"""Start a page in the browser: tokens of an image merging under a slider.

It also has a threshold that lets every image keep as many tokens as it needs, images by a diffusion model, and objects
found by a detector. It runs the models that come with agglo and needs no network; --model, --pipeline and --detector
put others in their place, and --tuned adds results of agglo tune to the methods. Only this machine can reach it, unless
--host says otherwise. docs/playground.md tells more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from agglo.lab.cli.arguments import INTERRUPTED
from agglo.lab.options import AtLeastOne, ModelOptions, Whole, ZeroShotOptions, matching, option

EXAMPLES = """\
examples:
  agglo play
  agglo play --model deit_tiny_patch16_224 --checkpoint deit_tiny.safetensors
  agglo play --model torchvision:vit_b_16 --checkpoint vit_b_16.pth
  agglo play --model hf:my-vit/                    a folder that transformers' save_pretrained wrote
  agglo play --model open_clip:ViT-B-32 --checkpoint clip.pt --zero-shot --class-names animals.txt
  agglo play --pipeline stable-diffusion-1.5/ --steps 20 --device cuda
  agglo play --tuned tuned.json --port 8000
"""


@dataclass(frozen=True, kw_only=True)
class Options(ZeroShotOptions):
    """What to serve, and where."""

    GROUP: ClassVar = "other models"

    model: str | None = option(None, f"{ModelOptions.MODEL_HELP} (default: the one in agglo)", group=ModelOptions.GROUP)
    pipeline: str | None = option(None, "a pipeline of diffusers (default: the generator in agglo)", metavar="DIR")
    steps: AtLeastOne | None = option(None, "of denoising (default: 25, of a pipeline 50)")
    detector_name: str = option(
        "embedded", "the folder of a run of agglo detect train, or its weights", flags=("--detector",), metavar="D"
    )
    tuned_files: Sequence[Path] = option((), "results of agglo tune", flags=("--tuned",))
    device: str = option("cpu", "cpu, cuda, mps, ...", metavar="D")
    host: str = option("127.0.0.1", "address to listen at", metavar="H", group="where")
    port: Whole = option(7860, "0 is any that is free", metavar="P", group="where")


def run(options: Options) -> None:
    import gradio  # noqa: F401 says what is missing before any model is made

    from agglo.lab.playground.models import Models
    from agglo.lab.playground.serving import serve

    models = Models(**{**matching(Models, options), "spec": options.trained_spec()})
    models.open_first()
    with suppress(KeyboardInterrupt):  # uvicorn ends either so or by returning
        serve(models, options.host, options.port)
    # Models may still be running in threads, and torch aborts the process if Python's own ending stops one of them.
    print("agglo: interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
