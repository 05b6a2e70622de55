"""The documents against the code: generated pages, the store that is read in plain safetensors, environment variables."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.config.recipe import Recipe
from draftsmith.store.codec import Form
from draftsmith.store.format import Sequence, StoreIdentity
from draftsmith.store.writer import StoreWriter

ROOT = Path(__file__).parents[2]
LAYERS, HIDDEN = (1, 3, 4), 6


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `make docs` generates."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, ROOT / "scripts" / "reference_pages.py", folder]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return {path.stem: path.read_text() for path in folder.glob("*.md")}


def test_references_name_everything(pages: dict[str, str]) -> None:
    assert pages.keys() == {"recipe", "cli", "results"}
    for section, field in Recipe.model_fields.items():
        assert f"`{section}`" in pages["recipe"]
        assert f"## `{section}`" in pages["recipe"] or not hasattr(field.annotation, "model_fields")
    assert re.search(r"`max_tokens` <small>integer, at least 1; default `256`</small>\n:   \w", pages["recipe"])
    assert "## `train.drafter (eagle3)`" in pages["recipe"]
    for command in (
        "run",
        "extract",
        "train",
        "convert",
        "predict",
        "evaluate",
        "tune",
        "serve",
        "generate",
        "publish",
        "inspect",
        "export",
        "import",
        "doctor",
    ):
        assert f"## `draftsmith {command}`" in pages["cli"]
    assert "`--plan`" in pages["cli"]
    assert re.search(r"`acceptance_length` <small>number</small>\n:   \w", pages["results"])
    # A link goes to a heading of its page.
    for page in pages.values():
        assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= set(re.findall(r"\{#([\w-]+)\}", page))


@pytest.mark.parametrize("form", ["none", "lossless"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_store_is_read_as_its_page_says(
    form: Form, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = StoreIdentity(
        target="tiny",
        target_revision="r",
        target_config_hash="c",
        tokenizer_hash="t",
        chat_template_hash="h",
        layer_ids=LAYERS,
        hidden_size=HIDDEN,
        dtype=dtype,
        sampling={},
    )
    expected = {}
    folder = tmp_path / "runs" / "demo" / "store"
    folder.mkdir(parents=True)
    with StoreWriter(folder, identity, shard_tokens=300, compression=form) as writer:
        for number in range(4):
            states = torch.randn(200 + number, len(LAYERS), HIDDEN).to(getattr(torch, dtype))
            tokens = torch.arange(201 + number, dtype=torch.int32)
            writer.append(Sequence(number, False, tokens, tokens > 3, states))
            expected[len(states)] = states
        writer.close()
    plain, ours = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "store-format.md").read_text(), flags=re.S)
    found: list[torch.Tensor] = []
    monkeypatch.chdir(tmp_path)
    exec(plain.replace("print(", "found.append(states); print("), {"found": found})
    assert len(found) == len(expected)
    for states in found:
        assert torch.equal(states, expected[len(states)])
    capsys.readouterr()
    exec(ours, {})
    assert len(capsys.readouterr().out.splitlines()) == len(expected)


def test_environment_variables_are_documented() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    rooms = ["draftsmith", "extract", "train", "convert", "serve", "tests"]
    files = {path.resolve() for room in rooms for path in (ROOT / room).rglob("*.py")}
    read = r"(?:environ(?:\.get\(|\[|\.setdefault\()|envvar=)\"([A-Z][A-Z0-9_]+)\""
    names = {name for path in files for name in re.findall(read, path.read_text())}
    ours = {name for path in files for name in re.findall(r"\bDRAFTSMITH_[A-Z_]+\b", path.read_text())}
    internal = {
        name for name in names if name.startswith(("PYTEST_", "VLLM_AS_ON_GPUS")) or name in ("PATH", "PYTHONPATH")
    }
    undocumented = {name for name in (names | ours) - internal if f"`{name}`" not in page}
    assert not undocumented


def test_the_site_loads_nothing_from_other_hosts() -> None:
    site = (ROOT / "zensical.toml").read_text()
    assert "font = false" in site
    assert "http" not in site
