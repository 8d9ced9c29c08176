# Two commands: `make demo` and `make test`. Both need Python >= 3.10, git and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: $(shell grep -ohE '^[a-z-]+:' $(MAKEFILE_LIST) | tr -d :)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

setup: $(READY)  ## create .venv with the pinned versions

demo: $(READY)  ## set up, then show what token reduction does to the embedded model
	$(BIN)/agglo demo

play: $(READY)  ## set up, then open the playground: http://127.0.0.1:7860/
	$(BIN)/agglo play

test: lint types check-pages pytest  ## set up, then lint, type check, compare pages with records and run all tests

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy
	$(BIN)/mypy

pytest: $(READY)  ## the tests alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Chosen by measured processor time: 290 s of one busy core, so two minutes of two idle ones.
QUICK = tests/test_*.py tests/methods tests/drawing tests/utils tests/clustering/test_linkage.py tests/hosts/test_timm.py

quick: lint  ## while you work: lint, then the core of the library's tests (two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal $(QUICK)

browser-test: $(READY)  ## the playground in a real browser (part of make test where there is one; apt install chromium)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/lab/playground -rs

playground-images: $(READY)  ## the images of the playground in docs/images (needs a browser)
	$(BIN)/python -m tools.playground_images

bench-clustering: $(READY)  ## the clustering against scikit-learn, SciPy and fastcluster
	$(BIN)/agglo bench clustering --repeats 15 --json results/bench/clustering.json

pages: $(READY)  ## write the tables of results/ into README.md and docs/
	$(BIN)/python -m tools.pages

check-pages: $(READY)  ## whether the tables in README.md, docs/ and results/ are those of the records
	$(BIN)/python -m tools.pages --check

reproduce-miniature: $(READY)  ## every table and figure of the paper on what comes with agglo (DATA=; goes on when stopped)
	$(BIN)/agglo reproduce all --miniature --data $(FASHION)

# The longer studies. CHECKPOINT and IMAGES are a DeiT-Tiny and ImageNet's validation images, DATA is Fashion-MNIST's folder.
CHECKPOINT ?= deit_tiny_patch16_224.safetensors
CHECKPOINT2 ?= vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors
IMAGES     ?= imagenet
AUGREG     ?= vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors
PHOTOS     ?= photos-cc-by
PHOTO       = $(wildcard src/agglo/embedded/photos/*.jpg)
DATA       ?= /usr/share/datasets/fashion-mnist
FASHION     = fashion-mnist=$(DATA)
DEIT        = --data imagenet=$(IMAGES) --weights deit_tiny_patch16_224=$(CHECKPOINT)

bench-model: $(READY)  ## speed and memory of DeiT-Tiny: dense, ToMe, ATC and the ceiling (CHECKPOINT=; half an hour)
	$(BIN)/agglo bench model --checkpoint $(CHECKPOINT) --batch-size 1 2 4 8 16 64 --dtype float32 bfloat16 \
		--keep-rate 1 0.9 0.7 0.5 0.25 --flops 0.5 --repeats 7 --json results/bench/model.json --plot docs/images/model-speed.png

bench-methods: $(READY)  ## what one reduction stage of every method without parameters takes, against ToMe (seconds)
	$(BIN)/agglo bench methods --json results/bench/methods.json

bench-diffusion: $(READY)  ## a denoising step of four architectures against tomesd (a quarter of an hour on 2 idle cores)
	$(BIN)/agglo bench diffusion --architecture sd15 sd15-one-layer narrow embedded --json results/bench/diffusion.json

bench-adapter: $(READY)  ## a detector's backbone at 800 x 1344 pixels part by part, dense and reduced (2 minutes)
	$(BIN)/agglo bench adapter --json results/bench/adapter.json

bench-vlm: $(READY)  ## a vision-language model's time to its first token, with all and fewer image tokens (5 minutes)
	$(BIN)/agglo bench vlm --threads 1 --clock processor --repeats 7 --json results/bench/vlm.json

off-the-shelf: $(READY)  ## accuracy of every method without parameters on DeiT-Tiny (CHECKPOINT=, IMAGES=; half an hour)
	$(BIN)/agglo reproduce off-the-shelf $(DEIT)

better-atc: $(READY)  ## what each option beyond the paper's ATC does to DeiT-Tiny (CHECKPOINT=, IMAGES=; half an hour)
	$(BIN)/python -m studies better-atc $(DEIT)

recipe: $(READY)  ## what flops= costs on two real models, beside ATC and ToMe (CHECKPOINT=, CHECKPOINT2=, IMAGES=; half an hour)
	$(BIN)/python -m studies recipe $(DEIT) vit_tiny_patch16_224.augreg_in21k_ft_in1k=$(CHECKPOINT2)

ready-made: $(READY)  ## what agglo tune finds for DeiT-Tiny and the embedded classifier, put into the package (CHECKPOINT=, IMAGES=, DATA=; half an hour)
	$(BIN)/python -m tools.ready_made --checkpoint $(CHECKPOINT) --images $(IMAGES) --data $(DATA)

places: $(READY)  ## merging before attention beside merging after it, at equal GFLOPs (CHECKPOINT=, IMAGES=; three minutes)
	$(BIN)/python -m studies places $(DEIT)

readme-figures: $(READY)  ## the README's images of groups (CHECKPOINT=)
	$(BIN)/agglo visualize $(PHOTO) --checkpoint $(CHECKPOINT) -o docs/images/groups.gif
	$(BIN)/agglo visualize $(PHOTO) --checkpoint $(CHECKPOINT) --method tome atc --linkage single average complete \
		--keep-rate 0.5 -o docs/images/methods.jpg

docs: $(READY)  ## the documentation as a site, in build/site; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebook: $(READY)  ## run examples/tour.ipynb and store its outputs (two minutes)
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --log-level WARN \
		--ExecutePreprocessor.record_timing=False examples/tour.ipynb

train-generator: $(READY)  ## the embedded diffusion model, trained and put into the package (DATA=; an hour)
	$(BIN)/agglo train-generator --data $(DATA) --output runs/generator --precision bf16
	$(BIN)/python -m tools.embed generator --run runs/generator

mini-synthesis: $(READY)  ## images, Frechet distances and errors of the embedded diffusion model (DATA=; an hour or less)
	$(BIN)/agglo reproduce diffusion-fid --miniature --data $(FASHION)
	$(BIN)/agglo reproduce diffusion-samples --miniature
	$(BIN)/python -m studies diffusion-options --miniature --data $(FASHION)

mini-detection: $(READY)  ## a small detector with every method, off the shelf and fine-tuned (DATA=; hours, goes on when stopped)
	$(BIN)/agglo reproduce detection --miniature --data $(FASHION)

terrain: $(READY)  ## errors of a real pretrained U-Net of 1024 tokens (ONNX= its file; some minutes)
	$(BIN)/python -m studies terrain --weights terrain_consistency_unet_difficulty100=$(ONNX)

nuclei: $(READY)  ## a detector of nuclei in 334 microscope images, dense and reduced (DATA=, CHECKPOINT=; half an hour)
	$(BIN)/python -m studies nuclei --data nuclei=$(DATA) --weights deit_tiny_patch16_224=$(CHECKPOINT)

healing: $(READY)  ## what agglo heal gives on two classifiers (CHECKPOINT=, AUGREG=, IMAGES=, PHOTOS=; hours of one core, goes on when stopped)
	$(BIN)/python -m studies healing --data imagenet=$(IMAGES) photos=$(PHOTOS) \
		--weights deit_tiny_patch16_224=$(CHECKPOINT) vit_tiny_patch16_224.augreg_in21k_ft_in1k=$(AUGREG)

gpu-evidence: $(READY)  ## what can be known about the GPU path without a GPU: binaries, launches, races (five minutes of one core)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.gpu.evidence

gpu-check: $(READY)  ## everything a GPU can tell about agglo, for whoever has one: gpu-check.json (half an hour)
	$(BIN)/python -m tools.gpu.check

lock:  ## pin the newest versions again (needs `make setup` first)
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-header --no-annotate \
		--no-emit-index-url --extra all --extra dev pyproject.toml --output-file requirements.lock

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build
