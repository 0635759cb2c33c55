"""The README's map is the tree, and every link in the documents leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"])
FOLDERS = ("analysis", "hooks", "reports")


def drawn(text: str) -> set[str]:
    """Folders in the README's tree, as paths: those that begin a line, with their rooms below them."""
    block = next(part for part in text.split("```") if part.startswith("\nrun_analysis.py"))
    found, folder = set(), ""
    for line in block.splitlines():
        names = re.findall(r"(\w+)/", re.split(r"  +(?=\S)", line.strip())[0])
        if line and not line[0].isspace():
            folder = names[0] if len(names) == 1 else ""
            found |= set(names)
        else:
            found |= {f"{folder}/{name}" for name in names}
    return found


def dead_links(path: Path, text: str) -> list[str]:
    """Relative links of a document that lead to no file."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [link for link in links if "://" not in link and not (path.parent / link).exists()]


def missing_files(text: str) -> list[str]:
    """Files and modules of ours that a document names and that do not exist; what it says of earlier versions apart."""
    files = re.findall(r"\b(?:analysis|hooks|reports|tests|benchmarks|notebooks)/[\w/]+\.(?:py|md|sh|txt)\b", text)
    modules = re.findall(r"`((?:analysis|hooks|reports)(?:\.\w+)+)", text)
    found = [name for name in files if not (ROOT / name).is_file()]
    for name in modules:
        parts = name.split(".")
        paths = [ROOT.joinpath(*parts[:length]) for length in range(2, len(parts) + 1)]
        if not any(path.with_suffix(".py").is_file() or (path / "__init__.py").is_file() for path in paths):
            found.append(name)
    return found


def test_the_map_is_the_tree() -> None:
    rooms = {f"{folder}/{path.parent.name}" for folder in FOLDERS for path in (ROOT / folder).glob("*/__init__.py")}
    tree = drawn((ROOT / "README.md").read_text(encoding="utf-8"))
    assert rooms | set(FOLDERS) <= tree
    assert {name for name in tree if not (ROOT / name).is_dir()} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_files_and_modules_that_documents_name_exist(path: Path) -> None:
    assert missing_files(path.read_text(encoding="utf-8")) == []


def test_a_room_that_is_not_drawn_and_a_dead_link_would_be_seen() -> None:
    assert drawn("```\nrun_analysis.py  x\nhooks/  y\n  loading/  z\n  a/ b/  z\ndocs/ tests/\n```") == {
        *("hooks", "hooks/loading", "hooks/a", "hooks/b", "docs", "tests"),
    }
    assert missing_files("`hooks/ears.py` `hooks/models.py` `analysis.ears` `analysis.run.Run` `hooks.loading.gguf`") == [
        *("hooks/ears.py", "analysis.ears"),
    ]
    assert dead_links(ROOT / "README.md", "[a](docs/none.md) [b](docs/output.md#x) [c](https://x.y)") == ["docs/none.md"]
