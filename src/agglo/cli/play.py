"""agglo play"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agglo.cli.arguments import add_command, add_model, model_spec, positive, whole

_ABOUT = "a page to play with: an image, a slider, the groups"

_DETAILS = """\
Starts a page in the browser: tokens of a picture merging under a slider, a threshold that lets every picture keep as
many as it needs, pictures drawn by a diffusion model, objects found by a detector, and the curves of agglo tune. It
runs the models that come with agglo and needs no network; --model, --pipeline and --detector put others in their place.
Only this machine can reach it, unless --host says otherwise. docs/playground.md tells more.
"""

_EXAMPLES = """\
examples:
  agglo play
  agglo play --model deit_tiny_patch16_224 --checkpoint deit_tiny.safetensors
  agglo play --model torchvision:vit_b_16 --checkpoint vit_b_16.pth
  agglo play --model hf:my-vit/                    a folder that transformers' save_pretrained wrote
  agglo play --model open_clip:ViT-B-32 --checkpoint clip.pt --zero-shot --class-names animals.txt
  agglo play --pipeline stable-diffusion-1.5/ --steps 20 --device cuda
  agglo play --tuned tuned.json --port 8000
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "play", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    add_model(parser, default=None, zero_shot="ImageNet's 1000")
    others = parser.add_argument_group("other models")
    others.add_argument("--pipeline", metavar="DIR", help="a pipeline of diffusers (default: the generator in agglo)")
    others.add_argument("--steps", type=positive, metavar="N", help="of denoising (default: 25, of a pipeline 50)")
    others.add_argument(
        "--detector", metavar="D", help="the folder of a run of agglo detect train, or its weights (default: agglo's)"
    )
    others.add_argument("--tuned", type=Path, nargs="+", default=[], metavar="F", help="results of agglo tune")
    others.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda, mps, ... (default: %(default)s)")
    where = parser.add_argument_group("where")
    where.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen at (default: %(default)s)")
    where.add_argument(
        "--port", type=whole, default=7860, metavar="P", help="0 is any that is free (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    import gradio  # noqa: F401 says what is missing before any model is made

    from agglo.playground.classifiers import EMBEDDED
    from agglo.playground.models import Models, Wanted
    from agglo.playground.serving import is_loopback, serving

    own = arguments.model is None
    alone = ("checkpoint", "pretrained", "image_size", "num_classes", "zero_shot", "class_names", "templates")
    if own and (given := next((name for name in alone if getattr(arguments, name)), None)):
        raise ValueError(f"--{given.replace('_', '-')} says nothing without --model")
    wanted: dict[str, Any] = {} if arguments.detector is None else {"detector": arguments.detector}
    models = Models(
        Wanted(
            classifier=EMBEDDED if own else model_spec(arguments),
            pipeline=arguments.pipeline,
            steps=arguments.steps,
            tuned=arguments.tuned,
            device=arguments.device,
            **wanted,
        )
    )
    models.open_own()
    with serving(models, arguments.host, arguments.port) as served:
        if not is_loopback(arguments.host):
            print("agglo: anybody who can reach this machine can use the page", file=sys.stderr)
        print(f"agglo: the page is at {served.address} (Ctrl+C ends it)", flush=True)
        served.run()
