# Two commands: `make demo` and `make test`. Both need Python >= 3.10, git and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup demo test lint types pytest bench-clustering clustering-page bench-model bench-diffusion diffusion-page bench-adapter off-the-shelf better-atc off-the-shelf-page ready-made places mini-study better-tuned train-generator mini-synthesis mini-detection mini-detection-page coco-overfit nuclei-detection padding-effect readme-figures choosing-page docs notebook figures lock clean

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

test: lint types pytest  ## set up, then lint, type check and run the whole test suite

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy
	$(BIN)/mypy

pytest: $(READY)  ## the tests alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

bench-clustering: $(READY)  ## the clustering against scikit-learn, SciPy and fastcluster, and beside busy processes
	$(BIN)/agglo bench clustering --repeats 15 --output benchmarks/results/clustering.json
	$(BIN)/agglo bench clustering --contended --output benchmarks/results/clustering-contended.json

clustering-page: $(READY)  ## write the results of the one above into docs/clustering.md
	$(BIN)/python -m benchmarks.clustering_table

# The longer studies. CHECKPOINT and IMAGES are a DeiT-Tiny and ImageNet's validation images, DATA is Fashion-MNIST's folder.
CHECKPOINT ?= deit_tiny_patch16_224.safetensors
IMAGES     ?= imagenet
DATA       ?= /usr/share/datasets/fashion-mnist
SHELF      := $(BIN)/agglo evaluate deit_tiny_patch16_224 --checkpoint $(CHECKPOINT) --data $(IMAGES) \
	--json benchmarks/results/off-the-shelf.json --keep-rate 0.9 0.7 0.5 0.25

bench-model: $(READY)  ## images per second of DeiT-Tiny: dense, ToMe, ATC and the ceiling (CHECKPOINT=)
	$(BIN)/agglo bench model --checkpoint $(CHECKPOINT) --keep-rate 1 0.5 0.25 --repeats 9 \
		--json benchmarks/results/model.json --plot docs/images/model-speed.png

bench-diffusion: $(READY)  ## a step of Stable Diffusion 1.5's architecture against tomesd (20 minutes on 2 idle cores)
	$(BIN)/agglo bench diffusion --json benchmarks/results/diffusion.json

bench-adapter: $(READY)  ## a detector's backbone at 800 x 1344 pixels part by part, dense and reduced (2 minutes)
	$(BIN)/agglo bench adapter --json benchmarks/results/adapter.json

diffusion-page: $(READY)  ## write the results of the one above into docs/synthesis.md
	$(BIN)/python -m benchmarks.diffusion_table

off-the-shelf: $(READY)  ## accuracy of every method without parameters on DeiT-Tiny (CHECKPOINT=, IMAGES=; 20 minutes)
	$(SHELF) --method atc tome kmedoids pool topk evit ats l1 l2 linf random evovit --linkage single average complete
	$(SHELF) --method dpc_knn kmedoids --option weights=equal --no-dense
	$(SHELF) --method dpc_knn kmedoids --option weights=equal --no-dense --proportional on

better-atc: $(READY)  ## what each option beyond the paper's ATC does to DeiT-Tiny (CHECKPOINT=, IMAGES=; half an hour)
	$(SHELF) --no-dense --linkage single average complete --method atc:importance=class atc:importance=received \
		atc:mean=preserve_norm atc:features=tokens atc:features=tokens,importance=class,mean=preserve_norm
	$(SHELF) --no-dense --linkage single average complete --features tokens --acts "before block"
	$(SHELF) --no-dense --unread drop

off-the-shelf-page: $(READY)  ## write the results of the two above and of bench-model into docs/off-the-shelf.md
	$(BIN)/python -m benchmarks.off_the_shelf_table

ready-made: $(READY)  ## what agglo tune finds for DeiT-Tiny and the embedded models, put into the package (CHECKPOINT=, IMAGES=, DATA=; half an hour)
	$(BIN)/python -m benchmarks.ready_made --checkpoint $(CHECKPOINT) --images $(IMAGES) --data $(DATA)

places: $(READY)  ## merging before attention beside merging after it, at equal GFLOPs (CHECKPOINT=, IMAGES=; three minutes)
	$(BIN)/python -m benchmarks.places --checkpoint $(CHECKPOINT) --data $(IMAGES)

mini-study: $(READY)  ## all methods on the embedded model, off the shelf and fine-tuned (DATA=; two hours)
	$(BIN)/python -m benchmarks.mini_study --data $(DATA)

better-tuned: $(READY)  ## the better ATC beside the paper's, fine-tuned on the embedded model, three seeds (DATA=; half an hour)
	$(BIN)/python -m benchmarks.better_tuned --data $(DATA)

readme-figures: $(READY)  ## the README's pictures and numbers, from benchmarks/results (CHECKPOINT=)
	$(BIN)/python -m benchmarks.readme_figures --checkpoint $(CHECKPOINT)

choosing-page: $(READY)  ## write what the studies recorded into the tables of docs/choosing.md
	$(BIN)/python -m tools.choosing_table

docs: $(READY)  ## the documentation as a site, in build/site; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebook: $(READY)  ## run examples/tour.ipynb and store its outputs (two minutes)
	$(BIN)/python -m tools.site.notebook

figures: $(READY)  ## draw the pictures of "How it works" again
	$(BIN)/python -m tools.site.figures

train-generator: $(READY)  ## the embedded diffusion model, trained and put into the package (DATA=; an hour)
	$(BIN)/agglo train-generator --data $(DATA) --output runs/generator --precision bf16
	$(BIN)/python tools/embed_generator.py --run runs/generator

mini-synthesis: $(READY)  ## images, Frechet distances and errors of the embedded diffusion model (DATA=; an hour or less)
	$(BIN)/python -m benchmarks.mini_synthesis --data $(DATA)

mini-detection: $(READY)  ## a small detector with every method, off the shelf and fine-tuned (DATA=; three to four hours, goes on when stopped)
	$(BIN)/python -m benchmarks.mini_detection --data $(DATA)

mini-detection-page: $(READY)  ## write the results of the one above into docs/mini-detection.md
	$(BIN)/python -m benchmarks.mini_detection_report

coco-overfit: $(READY)  ## a detector learns twelve COCO images by heart (DATA=, CHECKPOINT=; ten minutes)
	$(BIN)/python -m benchmarks.real_detection overfit --data $(DATA) --checkpoint $(CHECKPOINT)

nuclei-detection: $(READY)  ## a detector of nuclei in 334 microscope images, dense and reduced (DATA=, CHECKPOINT=; half an hour)
	$(BIN)/python -m benchmarks.real_detection nuclei --data $(DATA) --checkpoint $(CHECKPOINT)

padding-effect: $(READY)  ## what the padding of a batch does to AP, apart or merged (DATA= fashion-mnist; ten minutes)
	$(BIN)/python -m benchmarks.padding_effect --data $(DATA)

lock:  ## pin the newest versions again (needs `make setup` first)
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-header --no-annotate \
		--no-emit-index-url --extra all --extra dev pyproject.toml --output-file requirements.lock

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build
