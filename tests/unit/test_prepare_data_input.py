import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.corpus.documents import InputOptions, plan_input, read_documents
from megatron_resilient.errors import DataError


def texts_of(paths, options=InputOptions(), **plan_options):  # noqa: B008
    plan = plan_input([Path(path) for path in paths], options, **plan_options)
    skipped = Counter(plan.skipped)
    documents = [
        document
        for section in plan.sections
        for document in read_documents(section, options, skipped)
    ]
    return [document.text for document in documents], skipped


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name, content in {
        "b.txt": b"second",
        "a.py": b"first",
        "c/inner.txt": b"fourth",
        "c/deep/z.py": b"third",
        ".git/config": b"hidden folder",
        ".env": b"hidden file",
        "image.png": b"\x89PNG\0",
        "empty.txt": b"",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_a_folder_is_read_in_the_order_of_names_and_says_what_it_left_out(tree):
    texts, skipped = texts_of([tree])
    assert texts == ["first", "second", "third", "fourth"]
    assert skipped == {"hidden": 2, "binary": 1, "empty": 1}


@pytest.mark.parametrize(
    ("options", "expected", "left_out"),
    [
        (InputOptions(globs=("*.py",)), ["first", "third"], {"not matched by --glob": 4}),
        (InputOptions(globs=("c/*",)), ["third", "fourth"], {"not matched by --glob": 4}),
        (InputOptions(globs=("*.py", "b.*")), ["first", "second", "third"], {}),
        (InputOptions(excludes=("deep",)), ["first", "second", "fourth"], {"excluded": 1}),
        (InputOptions(excludes=("c/inner.txt", "b.txt")), ["first", "third"], {"excluded": 2}),
        (InputOptions(excludes=("tree",)), ["first", "second", "third", "fourth"], {}),
        (InputOptions(excludes=("*",)), [], {"excluded": 6 + 1}),
    ],
)
def test_patterns(tree, options, expected, left_out):
    texts, skipped = texts_of([tree], options)
    assert texts == expected
    assert {reason: skipped[reason] for reason in left_out} == left_out


def test_named_files_are_read_whatever_they_are(tree):
    texts, skipped = texts_of([tree / "b.txt", tree / ".env"], InputOptions(globs=("*.md",)))
    assert texts == ["second", "hidden file"]
    assert not skipped


def test_a_file_is_read_once(tree):
    texts, skipped = texts_of([tree / "c", tree / "c" / "inner.txt", tree / "c"])
    assert texts == ["third", "fourth"]
    assert skipped == {"given twice": 3}


def test_links_to_folders_and_special_files_are_left_out(tree):
    (tree / "loop").symlink_to(tree)
    (tree / "broken").symlink_to(tree / "nowhere")
    (tree / "linked.txt").symlink_to(tree / "c" / "inner.txt")
    os.mkfifo(tree / "pipe")
    texts, skipped = texts_of([tree])
    assert texts == ["first", "second", "third", "fourth"]
    assert skipped["link to a folder"] == 1
    assert skipped["not a regular file"] == 2
    assert skipped["given twice"] == 1


def test_text_is_taken_as_it_is(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf one\r\n\ttwo\0 \n\n")
    assert texts_of([path])[0] == [" one\r\n\ttwo\0 \n\n"]


@settings(deadline=None)  # a busy machine is no error
@given(
    st.lists(st.text(min_size=1), max_size=12),
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.booleans(),
)
def test_json_lines_do_not_depend_on_how_they_are_cut(
    tmp_path_factory, texts, escaped, section_bytes, line_end, ends
):
    path = tmp_path_factory.mktemp("lines") / "a.JSONL"
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=escaped) for text in texts]
    path.write_bytes((line_end.join(lines) + line_end * ends).encode())
    assert texts_of([path], section_bytes=section_bytes) == (texts, Counter())


def test_empty_documents_are_left_out(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"text": ""}\n{"text": "x"}\n')
    assert texts_of([path]) == (["x"], Counter(empty=1))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine \xff", r"a\.txt: not UTF-8 at byte 5 \(invalid start byte\)"),
        ("a.txt", b"\xef\xbb\xbfx\xe2\x82", r"a\.txt: not UTF-8 at byte 4 \(unexpected end"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"a\.jsonl: not UTF-8 at byte 24 "),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3: not JSON \(Expecting value\)"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 200_000, r"a\.jsonl:2: not JSON \(maximum recurs"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', r"a\.jsonl:2: a JSON list, not an object"),
        ("a.jsonl", b'{"text": "a"}\n{"b": 1, "a": 2}\n', r":2: no key 'text'; it has 'a', 'b'"),
        ("a.jsonl", b"{}", r"a\.jsonl:1: no key 'text'; it has none"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: 'text' holds a int, not a string"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: the text has a lone surrogate"),
    ],
)
@pytest.mark.parametrize("section_bytes", [1, 2**20])
def test_unreadable_text_is_named(tmp_path, name, content, message, section_bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts_of([tmp_path], section_bytes=section_bytes)


def test_unreadable_text_is_skipped_or_repaired_on_request(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x\xff")
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "\xe9"}\n{"text": "ok"}\n{"text": "\\ud800y"}\n{"text": "\\ud83d\\ude00"}\n'
    )
    assert texts_of([tmp_path], InputOptions(encoding_errors="skip")) == (
        ["ok", "😀"],
        Counter({"not UTF-8": 3}),
    )
    plan = plan_input([tmp_path], options := InputOptions(encoding_errors="replace"))
    documents = [d for s in plan.sections for d in read_documents(s, options, Counter())]
    assert [(document.text, document.repaired) for document in documents] == [
        ("x\ufffd", True),
        ("\ufffd", True),
        ("ok", False),
        ("\ufffdy", True),
        ("😀", False),
    ]
    assert [document.size_bytes for document in documents] == [4, 3, 2, 4, 4]


def test_paths_that_are_no_input(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such file or folder"):
        plan_input([tmp_path / "nowhere"], InputOptions())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe: neither a file nor a folder"):
        plan_input([tmp_path / "pipe"], InputOptions())


def test_documents_too_large_to_tokenise_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_resilient.corpus.documents.MAX_DOCUMENT_BYTES", 20)
    (tmp_path / "a.txt").write_text("x" * 20)
    (tmp_path / "b.jsonl").write_text('{"text": "12345678"}' * 1)
    assert texts_of([tmp_path])[0] == ["x" * 20, "12345678"]
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": "123456789"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:2: a line of more than 20 bytes"):
        texts_of([tmp_path])
    (tmp_path / "a.txt").write_text("x" * 21)
    with pytest.raises(DataError, match=r"a\.txt: a document of 21 bytes, at most 20"):
        texts_of([tmp_path])
