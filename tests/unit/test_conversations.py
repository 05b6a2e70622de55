"""Rows to conversations: every layout, every kind of file, and every way in which a row can be wrong."""

import gzip
import json
import random
from contextlib import suppress
from pathlib import Path

import pytest

from draftsmith.config.recipe import ExtractConfig
from draftsmith.config.sources import Prompts
from draftsmith.data import rows as rows_module
from draftsmith.data.conversations import Conversation, RejectedRows
from draftsmith.data.prompts import load_prompts, read_conversations, split
from draftsmith.run.errors import UserError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2."},
]


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, *, whole: bool = True, **options) -> tuple[list[Conversation], RejectedRows]:
    rejected = RejectedRows()
    return list(read_conversations(Prompts(path=str(path), **options), whole=whole, rejected=rejected)), rejected


def reasons(rejected: RejectedRows) -> dict[str, int]:
    return {reason: entry["rows"] for reason, entry in rejected.figures().items()}


# ---- layouts ----

SHAREGPT = [
    {"from": name, "value": m["content"]}
    for name, m in zip(("system", "human", "gpt", "human", "gpt"), CHAT, strict=True)
]
ASKED = [{"role": "user", "content": "Why?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "So."}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": CHAT}, CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
         [{"role": "user", "content": "a\nb"}]),
        ({"messages": [{"role": "developer", "content": "x"}, *ASKED]}, [{"role": "system", "content": "x"}, *ASKED]),
        ({"conversations": SHAREGPT}, CHAT),
        ({"conversations": CHAT}, CHAT),
        ({"conversation": CHAT[1:]}, CHAT[1:]),
        ({"prompt": "Why?"}, ASKED),
        ({"prompt": "Why?", "response": "So."}, ANSWERED),
        ({"prompt": "Why?", "completion": "So."}, ANSWERED),
        ({"prompt": ASKED, "completion": ANSWERED[1:]}, ANSWERED),
        ({"instruction": "Why?", "input": "", "output": "So."}, ANSWERED),
        ({"instruction": "Add.", "input": "1 2", "output": "3"},
         [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]),
        ({"question": "Why?", "answer": "So."}, ANSWERED),
    ],
)  # fmt: skip
def test_layouts(tmp_path, row, messages):
    path = write(tmp_path / "a.jsonl", [row])
    (found,), rejected = read(path)
    assert (found.messages, len(rejected)) == (messages, 0)
    (prompt,), _ = read(path, whole=False)
    first = next(i for i, m in enumerate(messages) if m["role"] == "user")
    assert prompt.messages == messages[: first + 1]
    assert load_prompts(Prompts(path=str(path))) == [prompt]


def test_tools_and_calls(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
    ]
    for given in (tools, json.dumps(tools)):
        (found,), _ = read(write(tmp_path / "a.jsonl", [{"messages": messages, "tools": given}]))
        assert found.tools == tools
        assert found.messages[1]["content"] == ""
        assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
        assert found.messages[2] == messages[2]
        assert found.messages[3] == messages[3]


def test_text_and_tokens(tmp_path):
    (text,), _ = read(write(tmp_path / "a.jsonl", [{"text": "Once upon a time"}]))
    assert (text.document, text.text, text.messages) == ("Once upon a time", "Once upon a time", [])
    path = write(tmp_path / "b.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [5]}])
    (masked, plain), _ = read(path)
    assert (masked.token_ids, masked.loss_mask) == ([5, 6, 7], [False, True, True])
    assert (plain.token_ids, plain.loss_mask) == ([5], None)
    (asked, _), _ = read(path, whole=False)
    assert (asked.token_ids, asked.loss_mask) == ([5], None)
    assert len({c.sample_id for c in (text, masked, plain)}) == 3


def test_a_system_prompt_history_and_reasoning_beside_the_messages(tmp_path):
    told = {"system": "Be brief."}
    reasons_too = [*ASKED, {"role": "assistant", "content": "So.", "thinking": "Hm."}]
    rows = [{"prompt": "Why?", **told}, {"messages": CHAT, "system": "Other."}, {"messages": reasons_too},
            {"instruction": "And?", "history": [["Why?", "So."]]}]  # fmt: skip
    found, rejected = read(write(tmp_path / "a.jsonl", rows))
    assert [c.messages[0]["content"] for c in found] == ["Be brief.", "Be brief.", "Why?"]
    assert found[0].messages[1:] == ASKED
    assert found[2].messages[1]["reasoning_content"] == "Hm."
    assert list(reasons(rejected)) == ["its `history` is not read: write the turns as `messages`"]
    (shared,), _ = read(write(tmp_path / "b.jsonl", [{"conversations": SHAREGPT[1:], **told}]))
    assert shared.messages == CHAT


def test_the_turns_to_answer():
    def turns(*roles: str) -> list[list[str]]:
        messages = [{"role": role, "content": role} for role in roles]
        return [[m["role"] for m in turn] for turn in Conversation("x", messages).user_turns()]

    assert turns("system", "user", "assistant", "user") == [["system", "user"], ["user"]]
    assert turns("user", "user", "assistant") == [["user"], ["user"]]
    assert turns("assistant", "user", "assistant") == [["assistant", "user"]]
    assert turns("user", "assistant", "tool", "assistant", "user") == [["user"]]


# ---- kinds of files ----


def as_file(kind: str, folder: Path, rows: list[dict]) -> Path:
    import datasets

    if kind == "jsonl":
        return write(folder / "rows.jsonl", rows)
    if kind == "jsonl.gz":
        path = folder / "rows.jsonl.gz"
        path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
        return path
    if kind == "json":
        path = folder / "rows.json"
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
        return path
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(folder / "rows.parquet"))
        return folder / "rows.parquet"
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    return folder / "rows" if kind == "folder" else next((folder / "rows").glob("*.arrow"))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "arrow", "folder"])
def test_the_same_from_every_kind_of_file(tmp_path, kind):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"é {i} " + "word " * i * 40},
                {"role": "assistant", "content": "]"},
            ],
            "id": f"id{i}",
            "tools": [{"type": "function", "function": {"name": f"f{i}", **({"a": 1} if i else {"b": 2})}}],
        }
        for i in range(30)
    ]
    found, rejected = read(as_file(kind, tmp_path, rows))
    assert len(rejected) == 0
    assert [(c.id, c.messages, c.tools) for c in found] == [(r["id"], r["messages"], r["tools"]) for r in rows]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz", "a"])
@pytest.mark.parametrize(
    "data", [b"", b"\n \n", b"[]", b"\x00\x01\x02" * 50, b"PAR1", b"PAR1" + b"x" * 40, b"ARROW1\0\0", b"\x1f\x8b\x08junk",
             b"\xff\xfe{\x00", b"{", b"nonsense", b"[1, 2", b'{"a": 1}\n{"b": 2}']
)  # fmt: skip
def test_a_file_that_is_no_data_set_is_a_clear_error(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError, match=path.name) as raised:
        read(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError):
        load_prompts(Prompts(path=str(path)))


def test_a_folder_without_data_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match="has no data files"):
        read(tmp_path)


def test_a_table_whose_name_has_glob_characters(tmp_path):
    folder = tmp_path / "data [v1]"
    folder.mkdir()
    as_file("parquet", folder, [{"prompt": "Why?"}]).rename(folder / "part[1]*.parquet")
    assert [c.text for c in read(folder)[0]] == ["Why?"]


def test_a_folder_has_no_checksum(tmp_path):
    write(tmp_path / "rows.jsonl", [{"prompt": "Why?"}])
    with pytest.raises(UserError, match="`sha256` is that of a file"):
        read(tmp_path, sha256="0" * 64)


def test_long_arrays_come_in_pieces(tmp_path):
    """Rows of many sizes, so that reads end in the middle of words, escapes and characters of several bytes."""
    rng = random.Random(3)
    rows = [
        {"prompt": f"{i} " + "".join(rng.choice('é"\\😀 ,]}') for _ in range(rng.choice([1, 50, 90_000])))}
        for i in range(60)
    ]
    path = tmp_path / "rows.json"
    for ascii in (True, False):
        path.write_text(json.dumps(rows, ensure_ascii=ascii), encoding="utf-8")
        found, rejected = read(path)
        assert [c.text for c in found] == [row["prompt"] for row in rows]
        assert len(rejected) == 0
    path.write_text(json.dumps(rows)[:-30] + "\n")
    found, rejected = read(path)
    assert len(found) == len(rows) - 1
    assert len(rejected) == 1
    path.write_text(json.dumps(rows) + " more")
    assert list(reasons(read(path)[1])) == ["text after the end of the JSON array"]


# ---- rows that are wrong ----

GOOD = {"messages": CHAT}
ODD_VALUES = [None, True, 3, 2.5, 10**400, "", "  ", "text", "\ud800", "a\udfffb", "\0", [], [[]], [1], [None], ["x"], {}, {"role": "user"},
              {"content": "x"}, {"from": "human"}, {"type": "image_url"}, float("nan"), "x" * 3000]  # fmt: skip


def spoiled(rng: random.Random) -> bytes:
    """A line that is, most of the time, not a good row of any format."""
    how = rng.randrange(9)
    odd = rng.choice(ODD_VALUES)
    row = json.loads(json.dumps(GOOD))
    message = rng.choice(row["messages"])
    if how == 0:  # no JSON, no UTF-8, no text
        line = json.dumps(row).encode()
        place = rng.randrange(len(line))
        return rng.choice([line[:place], bytes(rng.randrange(11, 256) for _ in range(60)), line[:place] + b"\xff" + line[place:],
                           b"[" * rng.choice([5, 100_000]), b"9" * 5000, b"\0\0", b"NaN", b'{"messages":'])  # fmt: skip
    if how == 1:
        return json.dumps(odd).encode()
    if how == 2:
        row["messages"] = odd
    elif how == 3:
        message[rng.choice(["role", "content"])] = odd
    elif how == 4:
        del message[rng.choice(["role", "content"])]
    elif how == 5:
        row["messages"][rng.randrange(5)] = odd
    elif how == 6:
        row["tools"] = odd
        message["tool_calls"] = rng.choice(ODD_VALUES)
    elif how == 7:
        row = {rng.choice(["prompt", "conversations", "text", "input_ids", "turns", "question", "nothing"]): odd}
    elif how == 8:
        function = {"name": rng.choice(ODD_VALUES), "arguments": odd}
        message["tool_calls"] = [rng.choice([{"function": function}, function, {"function": odd}, odd])]
    return json.dumps(row).encode()


@pytest.mark.parametrize("seed", range(8))
def test_a_wrong_row_is_counted_and_explained(tmp_path, seed):
    """Eight times a hundred generated rows: each is a conversation that can be hashed and printed, or is counted."""
    rng = random.Random(seed)
    lines = [line for _ in range(100) if (line := spoiled(rng).replace(b"\n", b" ")).strip()]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *lines]))
    for format in ("auto", "jsonl", "sharegpt", "text", "tokens"):
        rejected = RejectedRows()
        found = []
        with suppress(UserError):  # where no row is left
            for conversation in read_conversations(
                Prompts(path=str(path), format=format), whole=True, rejected=rejected
            ):
                found.append(conversation)
        assert len(found) + len(rejected) == len(lines) + 1, "a row is a conversation or is counted"
        for conversation in found:
            assert conversation.sample_id >= 0
            json.dumps([conversation.messages, conversation.tools, conversation.document], ensure_ascii=False).encode()
            assert all(isinstance(m["content"], str) for m in conversation.messages)
        for line in rejected.lines():
            assert line.encode()
            assert "(first: line " in line
    found, rejected = read(path)
    assert found[0].messages == CHAT
    assert len(rejected) > 40


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
        ('{"messages": [{"content": "x"}]}', "no 'role'"),
        ('{"messages": [{"role": "user"}]}', "no 'content'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "unknown role 'robot'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "must be a string"),
        ('{"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}', "parts that are not text"),
        ('{"messages": 3}', "another type"),
        ('{"messages": [], "tools": 3}', "no message has the role `user`"),
        ('{"prompt": ""}', "not empty"),
        ("[1]", "must be a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_reasons_name_the_cause(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n{line}\n")
    found, rejected = read(path)
    assert len(found) == 1
    ((said, entry),) = rejected.figures().items()
    assert reason in said
    assert entry == {"rows": 2, "first": "line 3"}


def test_a_line_without_end_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * (3 << 20) + b"\n" + json.dumps(GOOD).encode())
    found, rejected = read(path)
    assert len(found) == 1
    assert reasons(rejected) == {"longer than 1 MiB": 1}


def test_reasons_do_not_grow_without_end():
    rejected = RejectedRows()
    for i in range(1000):
        rejected.add(f"reason {i}", f"line {i}")
    assert len(rejected) == 1000
    assert len(rejected.figures()) == 51


@pytest.mark.parametrize("format", ["jsonl", "sharegpt"])
def test_files_that_each_count_from_0_are_all_read(tmp_path, format):
    for part in "ab":
        texts = [f"{part}{number}" for number in range(3)]
        rows = [
            {"id": number, "conversations": [{"from": "human", "value": text}]}
            if format == "sharegpt"
            else {"id": number, "prompt": text}
            for number, text in enumerate(texts)
        ]
        write(tmp_path / f"{part}.jsonl", [*rows, rows[0]])
    found, rejected = read(tmp_path)
    assert [c.text for c in found] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert [c.id for c in found] == ["0", "1", "2", "0#2", "1#2", "2#2"], (
        "evaluation knows held-out prompts by their ids"
    )
    assert rejected.figures() == {"the same row occurs twice": {"rows": 2, "first": "a.jsonl, line 4"}}
    if format == "jsonl":
        with pytest.raises(UserError, match="the id '0' occurs twice"):
            load_prompts(Prompts(path=str(tmp_path)))


def test_an_id_that_looks_like_a_place_costs_no_other_row(tmp_path):
    asked = [{"from": "human", "value": f"{number}?"} for number in range(6)]
    rows = [{"id": "00002"}, {}, {}, {}, {}, {}]
    path = write(tmp_path / "s.jsonl", [row | {"conversations": [turn]} for row, turn in zip(rows, asked, strict=True)])
    assert len(read(path)[0]) == 6
    assert len(load_prompts(Prompts(path=str(path)))) == 5, "ids of suites are unique"


# ---- drawing and splitting ----


def test_the_same_question_about_another_document_is_another_prompt(tmp_path):
    """As in data for retrieval, with the document in the system prompt. All are on one side of the split."""
    question = {"role": "user", "content": "Who wrote it?"}
    rows = [{"messages": [{"role": "system", "content": f"Document {number}"}, question]} for number in range(3)]
    add, multiply = (
        [{"type": "function", "function": {"name": name, "parameters": {}}}] for name in ("add", "multiply")
    )
    with_tools = [{"messages": [question], "tools": tools} for tools in (add, multiply)]
    again = {"messages": [rows[0]["messages"][0], question | {"content": "who  wrote it?"}]}
    path = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "Who wrote it?"}, *with_tools, again, with_tools[1]])
    rejected = RejectedRows()
    extract = ExtractConfig(prompts=Prompts(path=str(path)), held_out_fraction=0)
    assert len(list(split(extract, whole=False, rejected=rejected))) == 6
    assert reasons(rejected) == {"the same conversation occurs twice": 2}
    held_out = write(tmp_path / "held-out.jsonl", [{"prompt": "WHO wrote it?"}])
    apart = ExtractConfig(prompts=Prompts(path=str(path)), held_out=Prompts(path=str(held_out)))
    with pytest.raises(UserError, match="No training prompts are left"):
        list(split(apart, whole=False, rejected=RejectedRows()))


def without_user(prompt: int, answer: int) -> dict:
    told = {"role": "system", "content": f"Write about topic {prompt}."}
    return {"messages": [told, {"role": "assistant", "content": f"Number {answer} says."}]}


def answered_tokens(prompt: int, answer: int) -> dict:
    return {"input_ids": [7, prompt, 8, answer], "loss_mask": [0, 0, 0, 1]}


@pytest.mark.parametrize("row", [without_user, answered_tokens])
def test_answers_to_one_prompt_are_on_one_side_without_a_user_message(tmp_path, row):
    rows = [row(prompt, answer) for prompt in range(40) for answer in range(10)]
    path = write(tmp_path / "rows.jsonl", rows)
    extract = ExtractConfig(prompts=Prompts(path=str(path)), mode="prefill", held_out_fraction=0.2)
    rejected = RejectedRows()
    found = list(split(extract, whole=True, rejected=rejected))
    kept, held_out = ({c.text for c, held in found if held == part} for part in (False, True))
    assert not kept & held_out
    assert held_out
    assert len(kept | held_out) == 40
    assert (len(found), len(rejected)) == (400, 0)


def test_conversations_that_begin_with_their_answer_are_told_apart(tmp_path):
    rows = [{"messages": [{"role": "assistant", "content": f"Number {i}."}]} for i in range(3)]
    rows += [{"input_ids": [5, i], "loss_mask": [1, 1]} for i in range(3)]
    for format, part in (("jsonl", rows[:3]), ("tokens", rows[3:])):
        found, _ = read(write(tmp_path / "rows.jsonl", part), format=format)
        assert len({conversation.text for conversation in found}) == 3


def test_the_split_counts_what_it_leaves_out(tmp_path):
    turns = [(f"Question {i % 90}", f"Answer {i}") for i in [*range(95), *range(5)]]
    rows = [{"prompt": question, "response": answer} for question, answer in turns]
    path = write(tmp_path / "rows.jsonl", [*rows, {"nothing": 1}])
    for whole in (True, False):
        rejected = RejectedRows()
        found = list(
            split(ExtractConfig(prompts=Prompts(path=str(path)), held_out_fraction=0.2), whole=whole, rejected=rejected)
        )
        kept, held_out = ([c for c, held in found if held == part] for part in (False, True))
        assert held_out
        assert not {c.text for c in kept} & {c.text for c in held_out}, "the same question is never in both"
        ids = {c.sample_id for c in [*kept, *held_out]}
        assert len(ids) == len(kept) + len(held_out) == (95 if whole else 90)
        assert len(ids) + len(rejected) == 101
        assert reasons(rejected)["no 'prompt'"] == 1


def test_a_draw_of_a_file_with_wrong_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"number {i:03d}"}) if i % 3 else "{" for i in range(90)]
    path.write_text("\n".join(lines))
    found, rejected = read(path, limit=10)
    assert len(found) == 10
    assert list(reasons(rejected).values()) == [30]
    assert found == read(path, limit=10)[0]


def test_a_hub_data_set_is_streamed(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": f"number {i}", "response": None} for i in range(50)])
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return rows.to_iterable_dataset() if options["streaming"] else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = Prompts(dataset="owner/name", config="main", split="test", revision="abc")
    assert len(list(read_conversations(source, whole=True, rejected=RejectedRows()))) == 50
    assert asked == [(("owner/name", "main"), {"split": "test", "revision": "abc", "streaming": True})]
    for streaming in (True, False):
        drawn = source.model_copy(update={"limit": 5, "streaming": streaming})
        found = [c.text for c in read_conversations(drawn, whole=True, rejected=RejectedRows())]
        assert len(set(found)) == 5
        assert found == [c.text for c in read_conversations(drawn, whole=True, rejected=RejectedRows())]

    def fails(*arguments, **options):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(UserError, match=r"Cannot read the data set owner/name .* no route"):
        list(read_conversations(source, whole=True, rejected=RejectedRows()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset": "owner/name", "path": "x"}, "does not go with"),
        ({"path": "x", "revision": "abc"}, "goes with `dataset`"),
        ({"dataset": "/a/b/c"}, "Hub id"),
    ],
)
def test_sources_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        Prompts(**options)


def test_a_source_as_it_was_written_out_is_read_again():
    source = Prompts(path="x")
    assert Prompts.model_validate(source.model_dump()) == source
