"""Files named by path or by package. pip is real; the packages are wheels zipped here, found without an index."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from draftsmith.config.sources import FileSource
from draftsmith.run.errors import UserError
from draftsmith.target import downloads

CONTENT = b"some model\n" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def make_wheel(folder: Path, name: str = "tiny_data", version: str = "1.2.3") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data/file.bin", CONTENT)
        wheel.writestr(f"{name}/__init__.py", "raise RuntimeError('data packages are never imported')")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder that pip looks for packages in, and nowhere else; the cache is new."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    make_wheel(folder)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return folder


def source(**changes: str) -> FileSource:
    return FileSource(**{"package": "tiny-data==1.2.3", "file": "tiny_data/data/file.bin", "sha256": SHA256, **changes})


def leftovers(cache: Path) -> list[str]:
    return [str(path) for path in cache.rglob("*") if path.name.startswith(".")]


def test_a_package_is_downloaded_once(wheels, tmp_path):
    path = downloads.fetch(source())
    assert path == tmp_path / "cache/packages/tiny-data-1.2.3/tiny_data/data/file.bin"
    assert path.read_bytes() == CONTENT
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert downloads.fetch(source()) == path
    assert not leftovers(tmp_path / "cache")


def test_a_damaged_cache_is_mended(wheels):
    path = downloads.fetch(source())
    path.write_bytes(CONTENT[:-1])
    assert downloads.fetch(source()).read_bytes() == CONTENT


def test_what_is_wrong_with_a_package_is_said(wheels, tmp_path):
    with pytest.raises(UserError, match=r"Could not download the package other==1: No matching distribution"):
        downloads.fetch(source(package="other==1"))
    with pytest.raises(UserError, match=r"holds no file tiny_data/nothing\.bin"):
        downloads.fetch(source(file="tiny_data/nothing.bin"))
    with pytest.raises(UserError, match="has the SHA-256"):
        downloads.fetch(source(sha256="0" * 64))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not leftovers(tmp_path / "cache")


@pytest.mark.parametrize("member", ["/etc/passwd", "../../outside", "tiny_data/../../../outside"])
def test_a_member_cannot_leave_the_cache(wheels, member):
    with pytest.raises(UserError, match="inside the package"):
        downloads.fetch(source(file=member))


def test_two_processes_at_once_get_the_same_file(wheels, tmp_path):
    code = f"from draftsmith.config.sources import FileSource; from draftsmith.target.downloads import fetch; print(fetch(FileSource(**{source().model_dump()!r})))"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == CONTENT
    assert not leftovers(tmp_path / "cache")


def test_a_path_is_checked(tmp_path):
    path = tmp_path / "file.bin"
    with pytest.raises(UserError, match="does not exist"):
        downloads.fetch(FileSource(path=str(path)))
    with pytest.raises(UserError, match="is a folder"):
        downloads.fetch(FileSource(path=str(tmp_path)))
    path.write_bytes(CONTENT)
    assert downloads.fetch(FileSource(path=str(path))) == path
    assert downloads.fetch(FileSource(path=str(path), sha256=SHA256)) == path
    with pytest.raises(UserError, match="correct `sha256`"):
        downloads.fetch(FileSource(path=str(path), sha256="0" * 64))


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTSMITH_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert downloads.cache_dir() == Path("/one")
    monkeypatch.delenv("DRAFTSMITH_CACHE")
    assert downloads.cache_dir() == Path("/two/draftsmith")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert downloads.cache_dir() == Path("/three/.cache/draftsmith")
