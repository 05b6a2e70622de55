"""Several machines, with actors that are threads here and engines that are none: every prompt is in the store once."""

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.config.recipe import Recipe
from draftsmith.extract import cluster
from draftsmith.extract.cluster import MachineActor, _Machine, balance_tokens
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.worker import Progress
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.store.format import CorruptStore, Sequence
from draftsmith.store.reader import Store
from draftsmith.store.writer import ShardMaker, StoreWriter
from tests.unit.test_store import identity, make_sequence, open_writer, same

RECIPE = Recipe.model_validate({
    "name": "r", "target": {"model": "owner/name", "dtype": "float32"},
    "extract": {"prompts": {"path": "p"}, "max_num_seqs": 2, "shard_tokens": 20, "machines": "all", "compression": "none"},
})  # fmt: skip


class RayError(Exception):
    pass


class FakeRay:
    """Calls are threads' futures; a machine that is `gone` answers no more, though it may go on working."""

    exceptions = SimpleNamespace(RayError=RayError)

    @staticmethod
    def wait(references: list[Future], num_returns: int) -> tuple[list[Future], list[Future]]:
        done, rest = wait(references, return_when=FIRST_COMPLETED)
        first = list(done)[:num_returns]
        return first, [*list(done)[num_returns:], *rest]

    @staticmethod
    def get(reference: Future) -> Any:
        return reference.result()

    @staticmethod
    def kill(handle: Any) -> None:
        pass


class Handle:
    def __init__(self, machine: MachineActor) -> None:
        self.machine = machine
        self.gone = threading.Event()
        self.exchange = SimpleNamespace(remote=self._call)

    def _call(self, requests: list[ExtractRequest]) -> Future:
        future: Future = Future()

        def answer() -> None:
            report = self.machine.exchange(requests)
            if self.gone.is_set():
                future.set_exception(RayError("the actor died"))
            else:
                future.set_result(report)

        threading.Thread(target=answer, daemon=True).start()
        return future


def expected(request: ExtractRequest) -> Sequence:
    return make_sequence(request.sample_id, 3, 3, last_has_state=False)


Answering = Callable[[Iterable[ExtractRequest | None]], Iterator[Sequence | None]]


def answering(requests: Iterable[ExtractRequest | None]) -> Iterator[Sequence | None]:
    """As engines do: up to four at once, in any order. None: they have run dry."""
    chooser, under_way = random.Random(threading.get_ident()), []
    pending, end = iter(requests), object()
    while True:
        request: Any = None
        while len(under_way) < 4 and (request := next(pending, end)) not in (None, end):
            under_way.append(request)
        if under_way:
            time.sleep(0.001)
            yield expected(under_way.pop(chooser.randrange(len(under_way))))
        elif request is end:
            return
        else:
            yield None


def shards_of(sequences: Iterator[Sequence | None], store: Path) -> Iterator[Progress]:
    """As workers write them."""
    maker = ShardMaker(identity(), "none")
    for sequence in sequences:
        if sequence is not None:
            maker.add(sequence)
            yield Progress(None, len(maker.sample_ids), maker.tokens)
        if maker.tokens >= 20 or (sequence is None and maker.tokens):
            yield Progress(maker.write(store / f"shard-{secrets.token_hex(4)}.safetensors"), 0, 0)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[_Machine]]:
    """Starts machines; each takes the way of answering that it is given."""
    ways: dict[int, Answering] = {}
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path / "local"))

    def run_engines(job: object, requests: Any, engine: object, *, store: Path, **_: object) -> Iterator[Progress]:
        return shards_of(ways[threading.get_ident()](requests), store)

    class Faked(MachineActor):
        def _run(self) -> None:
            ways[threading.get_ident()] = self.way
            super()._run()

    monkeypatch.setattr(cluster, "run_engines", run_engines)
    monkeypatch.setattr(cluster, "engine_job", lambda *given: None)
    monkeypatch.setattr(cluster, "store_identity", lambda *given: identity())
    monkeypatch.setattr(cluster, "prepare_target", lambda target: None)
    monkeypatch.setattr(cluster, "describe_target", lambda path, target: None)

    def starting(*some: Answering, marked: bool = True) -> list[_Machine]:
        machines = []
        for number, way in enumerate(some):
            name = secrets.token_hex(4)
            if marked:
                (tmp_path / cluster._marker(name)).touch()
            Faked.way = staticmethod(way)
            machines.append(_Machine(Handle(Faked(RECIPE, identity(), tmp_path, name)), f"10.0.0.{number}"))
            time.sleep(0.01)
        return machines

    return starting


def requests(count: int) -> list[ExtractRequest]:
    return [ExtractRequest(number, False, [1, 2, 3], 3) for number in range(count)]


def whole(directory: Path, count: int) -> None:
    store = Store(directory)
    assert len(store) == store.counts["sequences"] == count
    for found, request in zip(store, requests(count), strict=True):
        same(found, expected(request))


@pytest.mark.parametrize("count", [0, 1, 60])
def test_everything_is_in_the_store_once(start: Callable, tmp_path: Path, count: int) -> None:
    writer = open_writer(tmp_path)
    machines = start(answering, answering)
    progress = list(balance_tokens(FakeRay, machines, requests(count), writer))
    assert progress[-1] == (count, 5 * count)
    for machine in machines:
        machine.handle.machine.stop()
        assert machine.handle.machine._failure is None
    writer.close()
    whole(tmp_path, count)


def test_prompts_are_read_as_they_are_needed(start: Callable, tmp_path: Path) -> None:
    read = []

    def counted() -> Iterator[ExtractRequest]:
        for request in requests(1000):
            read.append(request)
            yield request

    running = balance_tokens(FakeRay, start(answering, answering), counted(), open_writer(tmp_path))
    sequences = 0
    while sequences < 100:
        sequences, _ = next(running)
    assert len(read) < 300, "a data set is not read ahead of the machines"


@pytest.mark.parametrize("seed", range(5))
def test_a_dead_machines_share_is_taken_over_and_its_ghost_changes_nothing(
    start: Callable, tmp_path: Path, seed: int
) -> None:
    writer = open_writer(tmp_path)
    machines = start(answering, answering, answering)
    ghosts = random.Random(seed).sample(machines, 2)
    deaths = iter([(10, ghosts[0]), (random.Random(seed).randrange(10, 60), ghosts[1]), (10**9, None)])
    when, victim = next(deaths)
    for sequences, _ in balance_tokens(FakeRay, machines, requests(90), writer):
        if sequences >= when:
            victim.handle.gone.set()  # for the driver; its thread goes on with what it was given
            when, victim = next(deaths)
    assert len(machines) == 1
    for ghost in ghosts:
        ghost.handle.machine.stop()
        assert ghost.handle.machine._failure is None
    files = set(tmp_path.glob("shard-*"))
    assert {path.name for path in files} > {shard.file for shard in writer._shards}, "a ghost wrote nothing: no test"
    whole(tmp_path, 90)
    writer.close()
    whole(tmp_path, 90)
    assert len(list(tmp_path.glob("shard-*"))) < len(files), "what nobody adopted is removed"


def failing(requests: Iterable[ExtractRequest | None]) -> Iterator[Sequence | None]:
    for number, sequence in enumerate(answering(requests)):
        if number == 6:
            raise DraftsmithError("The vLLM engine failed: no reason.")
        yield sequence


def test_when_the_last_machine_fails_the_run_stops_says_why_and_can_be_continued(
    start: Callable, tmp_path: Path
) -> None:
    writer = open_writer(tmp_path)
    with pytest.raises(DraftsmithError, match=r"10\.0\.0\.\d failed.*no reason.*\n.*Run the stage again"):
        list(balance_tokens(FakeRay, start(failing, failing), requests(40), writer))
    writer._lock.close()
    writer = open_writer(tmp_path)
    done = writer.sample_ids
    assert len(done) == 8, "each machine had closed one shard of four"
    todo = [request for request in requests(40) if request.sample_id not in done]
    list(balance_tokens(FakeRay, start(answering), todo, writer))
    writer.close()
    whole(tmp_path, 40)


def test_a_machine_that_does_not_see_the_stores_folder_ends_the_run(start: Callable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"machine 10\.0\.0\.0: .*not the one that the driver writes to"):
        list(balance_tokens(FakeRay, start(answering, marked=False), requests(4), open_writer(tmp_path)))


def test_ray_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[ray\]'"):
        list(cluster.extract_on_machines(RECIPE, identity(), [], open_writer(tmp_path), tmp_path))


def cluster_of(*resources: dict[str, float]) -> Any:
    nodes = [{"NodeID": str(i), "Alive": True, "Resources": some} for i, some in enumerate(resources)]
    return SimpleNamespace(
        nodes=lambda: [*nodes, {"NodeID": "x", "Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}}]
    )


@pytest.mark.parametrize(
    ("resources", "machines", "found"),
    [
        ([{"CPU": 4.0}, {"CPU": 2.0}, {}], "all", {"0": {"num_cpus": 4}, "1": {"num_cpus": 2}}),
        ([{"CPU": 4.0}, {"CPU": 2.0}], 1, {"0": {"num_cpus": 4}}),
        ([{"CPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}], "all", {"1": {"num_gpus": 2}}),
        ([{"CPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}], 2, "needs 2 machines with 2 GPUs .* of the 2 machines .* 1 have"),
        ([{"CPU": 64.0, "GPU": 1.0}], "all", "needs 1 machines with 2 GPUs"),
        ([{}], "all", "at least one core"),
    ],
)
def test_machines_with_gpus_are_used_where_there_are_any(
    resources: list[dict], machines: int | str, found: dict | str
) -> None:
    options = RECIPE.extract.model_copy(update={"machines": machines, "workers": 2})
    recipe = RECIPE.model_copy(update={"extract": options})
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            cluster._nodes(cluster_of(*resources), recipe)
    else:
        assert {node["NodeID"]: asked for node, asked in cluster._nodes(cluster_of(*resources), recipe)} == found


def test_folders_of_killed_machines_are_removed_and_those_of_living_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "draftsmith-machine-left"
    left.mkdir()
    (left / "lock").touch()
    with cluster._local_folder() as first:
        with cluster._local_folder() as second:
            assert {*tmp_path.iterdir()} == {first, second}
        assert [*tmp_path.iterdir()] == [first]
    assert not [*tmp_path.iterdir()]


def test_a_failed_machines_logs_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(DraftsmithError), cluster._local_folder() as folder:  # noqa: PT012
        (folder / "engine.log").touch()
        raise DraftsmithError("its log is there")
    assert {path.name for path in folder.iterdir()} == {"engine.log", "lock"}


# ---- adopting ----


def made(directory: Path, name: str, sample_ids: list[int]) -> Any:
    maker = ShardMaker(identity(), "none")
    for sample_id in sample_ids:
        maker.add(make_sequence(sample_id, 3, 3, last_has_state=False))
    return maker.write(directory / f"shard-{name}.safetensors")


def test_adopted_shards_and_own_ones_are_one_store(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, shard_tokens=1)
    writer.append(make_sequence(0, 3, 3, last_has_state=False))
    assert writer.adopt(made(tmp_path, "a-0", [2, 1])) == [2, 1]
    writer.append(make_sequence(3, 3, 3, last_has_state=False))
    assert writer.sample_ids == {0, 1, 2, 3}
    assert writer.close()["sequences"] == 4
    whole(tmp_path, 4)


@pytest.mark.parametrize("sample_ids", [[7, 1], [7, 7]])
def test_a_conversation_is_adopted_once(tmp_path: Path, sample_ids: list[int]) -> None:
    writer = open_writer(tmp_path)
    writer.adopt(made(tmp_path, "a-0", [0, 1]))
    with pytest.raises(ValueError, match=r"shard-b-0.* in the store already"):
        writer.adopt(made(tmp_path, "b-0", sample_ids))
    assert writer.sample_ids == {0, 1}
    writer.close()
    whole(tmp_path, 2)


def test_damaged_shards_are_not_adopted(tmp_path: Path) -> None:
    writer: StoreWriter = open_writer(tmp_path)
    shard = made(tmp_path, "a-0", [0, 1])
    path = tmp_path / shard.file
    good = path.read_bytes()
    for bad in (good[:-1], good[:100] + b"\xff" + good[101:]):
        path.write_bytes(bad)
        with pytest.raises(CorruptStore):
            writer.adopt(shard)
    path.unlink()
    with pytest.raises(CorruptStore, match="not there"):
        writer.adopt(shard)
    assert writer.close()["sequences"] == 0
