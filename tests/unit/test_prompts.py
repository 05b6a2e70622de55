"""Prompts: layouts, drawing, and that training and held-out stay apart."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.config.recipe import ExtractConfig
from draftsmith.config.sources import Prompts
from draftsmith.data.conversations import Pieces, RejectedRows
from draftsmith.data.prompts import Prompt, load_prompts, read_conversations, split, training_and_held_out
from draftsmith.run.errors import UserError

SHIPPED = Path(__file__).parents[2] / "recipes" / "prompts"


def prompt(text: str, id: str = "x") -> Prompt:
    return Prompt(id, [{"role": "user", "content": text}])


def write(path: Path, rows: list) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def texts(path: Path, **options) -> list[str]:
    return [prompt.text for prompt in load_prompts(Prompts(path=str(path), **options))]


# ---- layouts ----


def test_lines_with_prompt_or_messages(tmp_path):
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\u2028there"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "More"},
    ]
    path = write(tmp_path / "p.jsonl", [{"prompt": "Why?", "id": 7, "category": "x"}, {"messages": conversation}])
    first, second = load_prompts(Prompts(path=str(path)))
    assert first == Prompt("7", [{"role": "user", "content": "Why?"}])
    assert second == Prompt("00002", conversation[:2])
    assert second.text == "Hello\u2028there"


def sharegpt(id: str, *turns: str) -> dict:
    speakers = ("human", "gpt")
    return {"id": id, "conversations": [{"from": speakers[i % 2], "value": turn} for i, turn in enumerate(turns)]}


def test_a_sample_id_is_the_conversations_own():
    known = prompt("Why?").sample_id
    assert known == 136694256616538024
    assert prompt("Why?", id="other").sample_id == known
    assert prompt("Why not?").sample_id != known
    assert 0 <= known < 2**63


def test_sharegpt_cut_off_in_the_middle(tmp_path):
    rows = [
        sharegpt("a_0", "First?", "Yes."),
        sharegpt("a_9", "and then?"),  # a later piece of a_0
        {"id": "b_0", "conversations": [{"from": "gpt", "value": "answer without its question"}]},
        {"id": "c_0", "conversations": []},
        sharegpt("d", "Second?"),
        sharegpt("d", "Second?"),
        sharegpt("e_0", "never complete"),
    ]
    text = json.dumps(rows, indent=2)
    path = tmp_path / "s.json"
    path.write_text(text[: text.index("never")])
    assert texts(path) == ["First?", "Second?"]
    path.write_text(text)
    assert texts(path) == ["First?", "Second?", "never complete"]


def kept_ids(path: Path, rows: list) -> list[str]:
    return [prompt.id for prompt in load_prompts(Prompts(path=str(write(path, rows))))]


@pytest.mark.parametrize("turns", [["Who?", "I."], ["Who?", "I.", "Really?", "Yes."], ["Who?"]])
def test_numbered_sharegpt_rows_are_not_pieces(tmp_path, turns):
    """As FastChat's `identity_0`, `identity_1`, ...: consecutive, with gaps, shuffled, and with a system prompt."""
    consecutive = [f"identity_{i}" for i in range(5)]
    later = ["train_3", "train_17", "train_20"]  # a part of a data set, without `train_0`
    shuffled = ["row_7", "row_0", "row_9", "row_4"]
    ids = consecutive + later + shuffled
    assert kept_ids(tmp_path / "s.jsonl", [sharegpt(id, *turns) for id in ids]) == ids
    told = [sharegpt(id, *turns) for id in consecutive]
    for row in told:
        row["conversations"].insert(0, {"from": "system", "value": "Be brief."})
    assert kept_ids(tmp_path / "s.jsonl", told) == consecutive


def test_pieces_in_shuffled_rows():
    """A data set of the Hub with a limit: only rows of an id that overlap show that they are numbered."""
    pieces = Pieces(in_order=False)

    def later(id: str, *turns: str) -> bool:
        return pieces.is_later(id, sharegpt(id, *turns)["conversations"])

    assert later("a_4", "Really?", "Yes.")
    assert later("a_2", "and then?", "Nothing.")
    assert not later("a_0", "First?", "Yes.")
    assert later("a_6", "So?")
    assert later("identity_3", "Who?", "I.")
    assert not later("identity_4", "Who are you?", "I.")
    assert not later("identity_40", "Who are you then?", "I.")


@pytest.mark.parametrize("in_order", [True, False])
def test_a_sample_of_numbered_sharegpt_rows(in_order):
    """Rows with gaps, of which no two overlap. A few are taken for pieces before that shows."""
    numbers = list(range(0, 3000, 3))
    if not in_order:
        random.Random(0).shuffle(numbers)
    pieces = Pieces(in_order=in_order)
    turns = sharegpt("", "Who?", "I.")["conversations"]
    later = [pieces.is_later(f"q_{number}", turns) for number in numbers]
    assert sum(later) < 16
    assert not any(later[16:])


def test_long_conversations_with_gaps_are_pieces():
    pieces = Pieces(in_order=True)
    starts = [0, 2, *range(6, 200, 4)]  # one that adjoins is enough
    later = [pieces.is_later(f"a_{start}", sharegpt("", "So?", "Yes.")["conversations"]) for start in starts]
    assert later == [False] + [True] * (len(starts) - 1)


def test_pieces_of_a_conversation_are_left_out_wherever_they_begin(tmp_path):
    rows = [
        sharegpt("a_0", "First?", "Yes."),
        sharegpt("b_0", "Another?", "No."),
        sharegpt("a_2", "and then?", "Nothing."),
        sharegpt("a_4", "Really?", "Yes."),
        sharegpt("a_0", "First?", "Yes."),  # ShareGPT has some conversations twice
        sharegpt("a_2", "and then?", "Nothing."),
        sharegpt("b_6", "so?", "So."),  # the piece between was left out
        {"id": "c_0", "conversations": [{"from": "gpt", "value": "Welcome."}]},
        sharegpt("c_1", "What now?", "Wait.", "How long?", "An hour."),
        # The turn is in both, as in some copies.
        {"id": "c_4", "conversations": [{"from": "gpt", "value": "An hour."}]},
        sharegpt("c_5", "Really?"),
    ]
    assert kept_ids(tmp_path / "s.jsonl", rows) == ["a_0", "b_0"]


def test_mt_bench_takes_first_turns(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question_id": 81, "category": "writing", "turns": ["One", "Two"]}])
    (only,) = load_prompts(Prompts(path=str(path)))
    assert (only.id, only.text) == ("81", "One")


def test_a_number_of_turns_is_no_mt_bench(tmp_path):
    rows = [{"prompt": "why", "turns": 2}, {"prompt": "how"}]
    assert texts(write(tmp_path / "p.jsonl", rows)) == ["why", "how"]


def test_humaneval_asks_for_the_function(tmp_path):
    row = {"task_id": "HumanEval/0", "prompt": "\ndef f(x):\n    pass\n", "entry_point": "f", "test": ""}
    path = tmp_path / "h.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (text,) = texts(path)
    assert "```python\ndef f(x):\n    pass\n```" in text
    assert not text.startswith("def")


def test_gsm8k_in_both_spellings(tmp_path):
    assert texts(write(tmp_path / "a.jsonl", [{"id": "g", "source": "gsm8k", "prompt": "2+2?"}])) == ["2+2?"]
    assert texts(write(tmp_path / "b.jsonl", [{"question": "2+2?", "answer": "4"}])) == ["2+2?"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: a row must be a JSON object"),
        ('{"text": "x"}', "line 3: not a row of the format `jsonl`: no 'prompt'"),
        ('{"prompt": 3}', "line 3: .*not empty"),
        ('{"prompt": " "}', "line 3: .*not empty"),
        ('{"prompt": "x", "id": "00001"}', "line 3: the id '00001' occurs twice"),
        ('{"messages": []}', "line 3: .*no message has the role `user`"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "line 3: .*unknown role 'robot'"),
        ('{"messages": "hello"}', "line 3: not a row"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        load_prompts(Prompts(path=str(path)))


def test_nothing_to_ask_is_an_error(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        load_prompts(Prompts(path=str(path)))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "p.parquet")
    with pytest.raises(UserError, match="is empty"):
        load_prompts(Prompts(path=str(tmp_path / "p.parquet")))
    write(path, [{"prompt": "too long"}])
    with pytest.raises(UserError, match="max_chars"):
        load_prompts(Prompts(path=str(path), max_chars=3))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="Cannot read"):
        load_prompts(Prompts(path=str(path)))


def test_a_file_of_another_kind_is_told_the_readable_ones(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("prompt\nwhy\nhow\n")
    for rejected in (None, RejectedRows()):  # of a suite, and of extraction
        with pytest.raises(UserError, match=r"not JSON .* Data is UTF-8 JSON lines .*, Parquet or Arrow\."):
            list(read_conversations(Prompts(path=str(path)), whole=False, rejected=rejected))


# ---- drawing ----


def test_the_draw_depends_on_the_seed_alone_and_keeps_the_order(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": f"number {i:03d}"} for i in range(100)])
    drawn = texts(path, limit=10)
    assert drawn == texts(path, limit=10) == sorted(drawn)
    assert drawn != texts(path, limit=10, seed=1)
    assert len(texts(path, limit=1000)) == 100


def test_long_prompts_are_left_out_before_the_draw(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "x" * i} for i in range(1, 21)])
    assert all(len(text) <= 10 for text in texts(path, max_chars=10))
    assert len(texts(path, max_chars=10, limit=10)) == 10


# ---- apart ----

short_texts = st.lists(st.text(alphabet="aAbB \n", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=40)


def same(a: str, b: str) -> bool:
    a, b = " ".join(a.casefold().split()), " ".join(b.casefold().split())
    return a[:80] == b[:80]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(training=short_texts, held_out=short_texts)
def test_training_and_held_out_never_meet(tmp_path, training, held_out):
    files = {
        name: Prompts(path=str(write(tmp_path / f"{name}.jsonl", [{"prompt": text} for text in rows])))
        for name, rows in (("training", training), ("held", held_out))
    }
    wanted = [text for text in training if not any(same(text, other) for other in held_out)]
    extract = ExtractConfig(prompts=files["training"], held_out=files["held"])
    if not wanted:
        with pytest.raises(UserError, match="No training prompts are left"):
            training_and_held_out(extract)
        return
    kept, held = training_and_held_out(extract)
    for group, source in ((kept, wanted), (held, held_out)):
        assert all(not same(a.text, b.text) for a in group for b in group if a is not b)
        assert all(any(same(text, p.text) for p in group) for text in source)
    assert all(not same(a.text, b.text) for a in kept for b in held)


def test_a_held_out_share_stays_held_out_when_prompts_are_added(tmp_path):
    rows = [{"prompt": f"question number {i}"} for i in range(400)]
    few = ExtractConfig(prompts=Prompts(path=str(write(tmp_path / "few.jsonl", rows[:200]))), held_out_fraction=0.1)
    many = ExtractConfig(prompts=Prompts(path=str(write(tmp_path / "many.jsonl", rows))), held_out_fraction=0.1)
    training, held_out = training_and_held_out(few)
    assert len(training) + len(held_out) == 200
    assert 5 < len(held_out) < 40
    _, more_held_out = training_and_held_out(many)
    assert {p.text for p in held_out} <= {p.text for p in more_held_out}


def test_a_share_that_holds_nothing_out_is_an_error(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "one"}])
    with pytest.raises(UserError, match="holds out no prompt"):
        training_and_held_out(ExtractConfig(prompts=Prompts(path=str(path)), held_out_fraction=1e-9))
    training, held_out = training_and_held_out(ExtractConfig(prompts=Prompts(path=str(path)), held_out_fraction=0))
    assert (len(training), held_out) == (1, [])


def test_overlap_is_equal_text_or_an_equal_beginning(tmp_path):
    start = "word " * 20  # 100 characters

    def kept(training: list[str], held_out: list[str]) -> list[str]:
        paths = [
            write(tmp_path / f"{i}.jsonl", [{"prompt": p} for p in one]) for i, one in enumerate((training, held_out))
        ]
        files = [Prompts(path=str(path)) for path in paths]
        return [p.text for p in training_and_held_out(ExtractConfig(prompts=files[0], held_out=files[1]))[0]]

    assert kept(["Hello  WORLD", "other"], ["hello\nworld"]) == ["other"]
    assert kept([start + "one", "other"], [start + "two"]) == ["other"]
    assert kept(["hello"], ["hello world"]) == ["hello"]


def test_the_shipped_prompts_are_balanced_and_apart():
    rows = {}
    for name in ("train", "heldout"):
        path = SHIPPED / f"demo-{name}.jsonl"
        rows[name] = [json.loads(line) for line in path.read_text().splitlines()]
        prompts = load_prompts(Prompts(path=str(path)))
        assert len({p.text for p in prompts}) == len(rows[name])
        categories = {row["category"] for row in rows[name]}
        assert {row["category"] for row in rows[name][: len(categories)]} == categories
    files = [Prompts(path=str(SHIPPED / f"demo-{name}.jsonl")) for name in ("train", "heldout")]
    training, held_out = training_and_held_out(ExtractConfig(prompts=files[0], held_out=files[1]))
    assert (training, held_out) == (load_prompts(files[0]), load_prompts(files[1])), "none is like one of the others"


@pytest.mark.parametrize(
    "options",
    [
        {"turns": "all", "prompts": {"limit": 200}, "held_out_fraction": 0.1},
        {"turns": "all", "prompts": {"limit": 300}, "held_out": {"limit": 50}},
        {"mode": "prefill", "prompts": {"max_chars": 60}, "held_out": {"limit": 50}},
        {"mode": "generate", "prompts": {"max_chars": 60, "limit": 100}, "held_out": {"limit": 50}},
    ],
)
def test_evaluation_asks_what_extraction_holds_out(tmp_path, options):
    """Which rows can be used, and so which are drawn, depends on whether their later turns are read."""
    rows = [
        {
            "id": f"c{n}",
            "conversations": [
                {"from": "human", "value": f"question number {n} of all"},
                {"from": "gpt", "value": "answer " * (n % 9)},
                {"from": "human", "value": "and " * (n % 7 + 1)},
                {"from": "gpt", "value": "" if n % 50 == 3 else "so"},
            ],
        }
        for n in range(1, 401)
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(rows))
    sections = {
        name: {"path": str(path), "format": "sharegpt"} | value if isinstance(value, dict) else value
        for name, value in options.items()
    }
    extract = ExtractConfig.model_validate(sections)
    taken = list(split(extract, whole=extract.reads_whole, rejected=RejectedRows()))
    training, held_out = training_and_held_out(extract)
    for found, is_held_out in ((training, False), (held_out, True)):
        assert [one.text for one in found] == [one.text for one, other in taken if other is is_held_out]
        assert all(len(one.user_turns()) == 1 and not one.has_answers for one in found)
    assert not {one.text for one in training} & {one.text for one in held_out}
