"""Another package's platform for vLLM: the choice arrives in every process that Draftsmith starts, and the user's VLLM_PLUGINS is kept."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

_PLATFORM = """
from vllm.platforms.interface import Platform, PlatformEnum


class StubPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "stub"
    device_type = "stub"
    dispatch_key = "PrivateUse1"
    device_control_env_var = "STUB_VISIBLE_DEVICES"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return f"a stub of a device, number {device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 32 * 2**30

    @classmethod
    def device_count(cls) -> int:
        return 2
"""

_ASKED = """
import json, os, sys
from pathlib import Path

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import environment
from draftsmith.engine.platform import current_platform, platform_plugins
from draftsmith.engine.process import EngineProcess
from draftsmith.serve.evaluation.configurations import machine_dtypes
from draftsmith.serve.evaluation.machine import describe_machine
from draftsmith.serve.vllm_server import VllmServer


def child(pipe):
    from vllm.platforms import current_platform as here

    seen = {name: os.environ.get(name) for name in ("VLLM_PLUGINS", "STUB_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
    pipe.send(seen | {"device": here.device_type})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    engine = EngineConfig()
    found = current_platform()
    process = EngineProcess(
        child, (), name="stub", engine=engine, log=folder / "log", variables=environment.only_these_gpus(["1"])
    )
    seen = process.receive()
    process.close()
    said = []
    program = "import json, os; print(json.dumps([os.environ.get(n) for n in ('VLLM_PLUGINS', 'STUB_VISIBLE_DEVICES')]))"
    server = VllmServer([sys.executable, "-c", program], engine=engine, url="http://127.0.0.1:1", show=said.append, gpus=["0", "1"])
    server._process.wait()
    server.end()
    print(json.dumps({
        "device": found.device, "plugins": platform_plugins(), "cpu": environment.is_cpu(),
        "devices": [[one.name, one.memory_bytes] for one in environment.gpus()], "names": describe_machine()["gpus"],
        "eager": environment.resolved(engine).enforce_eager, "memory": environment.memory_arguments(engine),
        "dtypes": machine_dtypes(), "child": seen, "server": json.loads(said[-1]), "own": os.environ.get("VLLM_PLUGINS"),
    }))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with an installed package that adds a platform, and one with another plugin, which is broken."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "stub_platform").mkdir()
    (folder / "stub_platform" / "__init__.py").write_text(
        "def register():\n    return 'stub_platform.platform.StubPlatform'\n\n\ndef general():\n    pass\n"
    )
    (folder / "stub_platform" / "platform.py").write_text(_PLATFORM)
    (folder / "another").mkdir()
    (folder / "another" / "__init__.py").write_text("raise SystemExit('a plugin for another vLLM')\n")
    entries = {
        "stub_platform": "[vllm.platform_plugins]\nstub = stub_platform:register\n\n[vllm.general_plugins]\nstub_more = stub_platform:general\n",
        "another": "[vllm.general_plugins]\nanother = another:register\n",
    }
    for name, points in entries.items():
        record = folder / f"{name}-1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (record / "entry_points.txt").write_text(points)
    return folder


def ask(packages: Path, folder: Path, **variables: str) -> tuple[dict[str, Any], str]:
    """What a process with these packages and variables finds, and what it says to people."""
    (folder / "asked.py").write_text(_ASKED)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([str(packages), dict(os.environ).get("PYTHONPATH", root)])
    environment = {
        name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES")
    }
    done = subprocess.run(
        [sys.executable, str(folder / "asked.py"), str(folder)], env=environment | {"PYTHONPATH": path} | variables, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, " ".join(done.stderr.split())


def test_a_platform_of_another_package(packages: Path, tmp_path: Path) -> None:
    found, said = ask(packages, tmp_path)
    assert found["device"] == "stub"
    assert not found["cpu"]
    assert found["plugins"] == ["stub", "stub_more"]
    assert found["devices"] == [["0", 32 * 2**30], ["1", 32 * 2**30]]
    assert found["names"] == ["a stub of a device, number 0", "a stub of a device, number 1"]
    assert found["eager"] is False
    assert "gpu_memory_utilization" in found["memory"]
    assert found["dtypes"] == ["bfloat16"]
    # An engine, in a process of its own, and a server: which plugins they load, on which device, and on which of them.
    assert found["child"]["device"] == "stub"
    assert found["child"]["VLLM_PLUGINS"] == "draftsmith,stub,stub_more"
    assert found["child"]["STUB_VISIBLE_DEVICES"] == "1"
    assert found["child"]["CUDA_VISIBLE_DEVICES"] is None
    assert found["server"] == ["draftsmith,stub,stub_more", "0,1"]
    assert found["own"] is None, "this process's own environment stays as it is"
    assert "leaves out" not in said


def test_the_user_s_choice_of_plugins_is_kept(packages: Path, tmp_path: Path) -> None:
    found, said = ask(packages, tmp_path, VLLM_PLUGINS="stub", STUB_VISIBLE_DEVICES="4,7")
    assert found["device"] == "stub"
    assert found["plugins"] == ["stub"]
    assert found["devices"] == [["4", 32 * 2**30], ["7", 32 * 2**30]]
    assert found["child"]["VLLM_PLUGINS"] == "stub,draftsmith"
    assert found["own"] == "stub"
    assert said.count("VLLM_PLUGINS=stub leaves out Draftsmith's plugin") == 1


def test_a_platform_that_the_user_leaves_out_is_not_used(packages: Path, tmp_path: Path) -> None:
    found, _ = ask(packages, tmp_path, VLLM_PLUGINS="draftsmith")
    assert found["device"] == "cpu"
    assert found["plugins"] == []
    assert found["child"]["device"] == "cpu"
    assert found["child"]["VLLM_PLUGINS"] == found["own"] == "draftsmith"
