# Two commands: `make demo` and `make test`. Both need Python >= 3.10, git and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup demo test lint types pytest bench-clustering clustering-page bench-model off-the-shelf off-the-shelf-page mini-study train-generator mini-synthesis readme-figures lock clean

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

off-the-shelf: $(READY)  ## accuracy of every method without parameters on DeiT-Tiny (CHECKPOINT=, IMAGES=; 20 minutes)
	$(SHELF) --method atc tome kmedoids pool topk evit ats l1 l2 linf random evovit --linkage single average complete
	$(SHELF) --method dpc_knn kmedoids --option weights=equal --no-dense
	$(SHELF) --method dpc_knn kmedoids --option weights=equal --no-dense --proportional on

off-the-shelf-page: $(READY)  ## write the results of the two above into docs/off-the-shelf.md
	$(BIN)/python -m benchmarks.off_the_shelf_table

mini-study: $(READY)  ## all methods on the embedded model, off the shelf and fine-tuned (DATA=; two hours)
	$(BIN)/python -m benchmarks.mini_study --data $(DATA)

readme-figures: $(READY)  ## the README's pictures and numbers, from benchmarks/results (CHECKPOINT=)
	$(BIN)/python -m benchmarks.readme_figures --checkpoint $(CHECKPOINT)

train-generator: $(READY)  ## the embedded diffusion model, trained and put into the package (DATA=; an hour)
	$(BIN)/agglo train-generator --data $(DATA) --output runs/generator --precision bf16
	$(BIN)/python tools/embed_generator.py --run runs/generator

mini-synthesis: $(READY)  ## images, Frechet distances and errors of the embedded diffusion model (DATA=; an hour or less)
	$(BIN)/python -m benchmarks.mini_synthesis --data $(DATA)

lock:  ## pin the newest versions again (needs `make setup` first)
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-header --no-annotate \
		--no-emit-index-url --extra all --extra dev pyproject.toml --output-file requirements.lock

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
