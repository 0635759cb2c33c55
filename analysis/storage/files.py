"""Every file that this program writes, by name, and what it holds; ``docs/output.md`` shows these tables."""

RUN_FILE = "run.json"
MOMENTS_FILE = "moments.safetensors"
CAUSAL_FILE = "causal.safetensors"
LAYERS = "layers.csv"
NEURONS = "neurons.parquet"
CURVES = "curves.csv"
EXTREMES = "extremes.csv"
EXPERTS = "experts.csv"
COSTS = "causal.csv"
REPLACEABLE = "causal_replaceable.csv"
COSTS_BY_NEURON = "causal_neurons.csv"
AGREEMENT = "causal_agreement.csv"
REPORT = "report.html"
FIGURES = "figures"
RANDOM_INIT = "random-init"
PROGRESS = ".causal-progress"
STAGING = ".writing-"
"""How the name of the hidden folder begins in which files are written before they are moved into place."""
COMPARISON_TABLE = "compare.csv"
COMPARISON_PAGE = "compare.html"
CLAIMS = "theory.csv"
THEOREMS = "theorems.csv"
SIZES = "sizes.csv"
THEORY_FIGURE = "theory.png"

SCHEMA = 3
"""Version of ``run.json`` and ``moments.safetensors``; a run with another one is refused."""

RUN_FILES = {
    RUN_FILE: "model, settings, corpus, checks, missing numbers and their reasons, provenance",
    MOMENTS_FILE: "the accumulated sums and the geometry of the weights, from which everything else is computed",
    LAYERS: "one row per analysed layer",
    NEURONS: "one row per neuron",
    CURVES: "one row per layer and scale α",
    EXTREMES: "the neurons of each layer with the largest output on a single token",
    EXPERTS: "one row per layer and expert; only if a layer is a mixture of experts",
    REPORT: "the run as one self-contained page",
    f"{FIGURES}/*.png": "every figure of the report",
    f"{RANDOM_INIT}/": "the run of the same architecture with random weights; only with `--null random-init`",
    COSTS: "one row per layer, edit and choice of positions; this and the files below only with `--causal`",
    REPLACEABLE: "how much of each layer can be replaced by c·ab or relu(a)·b at what cost",
    COSTS_BY_NEURON: "neurons patched one at a time; only with `--causal both`",
    AGREEMENT: "how well attribution predicts the exact cost; only with `--causal both`",
    CAUSAL_FILE: "the sums per sequence from which all costs are computed",
    f"{PROGRESS}/": "finished layers of an interrupted sweep, for `--resume`; deleted when the run is complete",
}
"""What the directory of a run may hold."""
COMPARISON_FILES = {
    COMPARISON_TABLE: "one row per run, layer and measure",
    COMPARISON_PAGE: "the comparison as one self-contained page",
    f"{FIGURES}/depth.png": "every run over relative depth",
    f"{FIGURES}/difference.png": "differences from the first run by layer; only if a run has the shape of the first",
}
"""What the directory of a comparison holds."""
THEORY_FILES = {
    CLAIMS: "every prediction about a form and an action, with what was measured",
    THEOREMS: "the two equivalences, unit by unit",
    SIZES: "parameters and operations per token of every form",
    f"{FIGURES}/{THEORY_FIGURE}": "g(a, b) and g(b, a) of every unit",
}
"""What the directory of ``theory --out`` holds."""
