"""Configuration files: what they may say, and what is said about every mistake in them."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral import ConfigEntry, ConfigError, load_config, parse_entries

SECRET = "hunter2"


def written(folder: Path, text: str | bytes, suffix: str = ".yaml") -> Path:
    path = folder / f"corral{suffix}"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(folder: Path, text: str | bytes, suffix: str = ".yaml") -> ConfigError:
    """The one error for this file: one line, with its path, and no secret, not even in a traceback."""
    path = written(folder, text, suffix)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"configuration {path}")
    assert "\n" not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value, chain=True))
    assert SECRET not in shown.replace(str(path), "")
    return caught.value


# --- what is right


FORMS = {
    "list.yaml": "- id: bash\n  name: local\n  config: {workdir: /srv, timeoutMs: 60000}\n",
    "mapping.yml": "entries:\n- {id: bash, name: local, config: {workdir: /srv, timeoutMs: 60000}}\n",
    "json.yaml": '[{"id": "bash", "name": "local", "config": {"workdir": "/srv", "timeoutMs": 60000}}]',
    "tables.toml": (
        '[[entries]]\nid = "bash"\nname = "local"\n[entries.config]\nworkdir = "/srv"\ntimeoutMs = 60000\n'
    ),
    "marked.yaml": "\ufeff- {id: bash, name: local, config: {workdir: /srv, timeoutMs: 60000}}\r\n",
    "marked.toml": (
        '\ufeffentries = [{id = "bash", name = "local", config = {workdir = "/srv", timeoutMs = 60000}}]'
    ),
    "anchors.yaml": (
        "- &base {id: bash, name: local, config: &c {timeoutMs: 1}}\n"
        "- {<<: *base, id: other, config: {<<: *c, timeoutMs: 2}}\n"
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_forms_of_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FORMS[name])
    entries = load_config(str(path) if "list" in name else path)
    assert (entries[0].id, entries[0].name) == ("bash", "local")
    if name == "anchors.yaml":
        assert [dict(entry.config) for entry in entries] == [{"timeoutMs": 1}, {"timeoutMs": 2}]
    else:
        # As it is written: the options are for the backend to understand.
        assert [dict(entry.config) for entry in entries] == [{"workdir": "/srv", "timeoutMs": 60000}]


def test_an_entry_needs_no_more_than_a_name() -> None:
    assert parse_entries([{"name": "local"}]) == (ConfigEntry(id="local", name="local"),)
    assert parse_entries([{"name": "local", "config": None}])[0].config == {}


def test_entries_may_come_ready_made() -> None:
    entry = ConfigEntry(id="mine", name="local", config={"timeout_ms": 5})
    first, second = parse_entries((entry, {"name": "local"}))
    assert first is entry
    assert second.id == "local"


def test_no_entries_are_no_mistake(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "[]")) == ()
    assert load_config(written(tmp_path, "entries = []", ".toml")) == ()


def test_a_configuration_does_not_show_its_options() -> None:
    entry = ConfigEntry(id="mine", name="local", config={"token": SECRET})
    assert SECRET not in repr(entry)


# --- files that are none


@pytest.mark.parametrize("suffix", ["", ".json", ".YAML", ".toml.bak"])
def test_the_suffix_says_what_it_is(tmp_path: Path, suffix: str) -> None:
    assert "the suffix must be .yaml, .yml or .toml" in str(refused(tmp_path, "[]", suffix))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nosuch\.yaml: cannot be read: No such file or directory"):
        load_config(tmp_path / "nosuch.yaml")


def test_a_path_that_is_none() -> None:
    with pytest.raises(ConfigError, match="is no path"):
        load_config("a\0b.yaml")


def test_a_file_that_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    with pytest.raises(ConfigError, match=r"loop\.yaml: cannot be read: Too many levels of symbolic links"):
        load_config(tmp_path / "loop.yaml")


def test_a_directory_and_a_fifo(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "fifo.yaml")
    for name in ("folder.yaml", "fifo.yaml"):
        with pytest.raises(ConfigError, match=f"{name}: is not a regular file"):
            load_config(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[]")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load_config(path)


def test_binary_files(tmp_path: Path) -> None:
    assert "is not UTF-8 (line 2)" in str(refused(tmp_path, b"- name: local\n\xff\xfe\x00"))
    for suffix in (".yaml", ".toml"):
        refused(tmp_path, b"\x7fELF\x02\x01\x01\x00\x00\n", suffix)
    assert "line 3: a character that is not allowed" in str(refused(tmp_path, b"- a\n- b\n- \x00\n"))


def test_a_huge_file(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        load_config(path)


@pytest.mark.parametrize("suffix", [".yaml", ".toml"])
def test_a_deep_file(tmp_path: Path, suffix: str) -> None:
    text = ("entries = " if suffix == ".toml" else "") + "[" * 50_000
    assert "nested too deeply" in str(refused(tmp_path, text, suffix))


# --- files with mistakes


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"- name: local\n  config:\n    token: [{SECRET}\n", 4),
        (f"- name: local\n\t- {SECRET}\n", 2),
        (f"- name: *{SECRET[:0]}nosuch\n", 1),
        (f"- name: local\n  config: !!python/object:os.system {{x: {SECRET}}}\n", 2),
        (f"- name: '{SECRET}\n", 2),
        ("- name: local\n---\n- name: local\n", 2),
        (f"- ? [{SECRET}]\n  : 1\n", 1),
    ],
)
def test_an_error_of_yaml_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    assert f"not YAML: line {line}, column " in str(refused(tmp_path, text))


def test_an_error_of_toml_names_the_line(tmp_path: Path) -> None:
    message = str(refused(tmp_path, f'[[entries]]\nname = "{SECRET}\n', ".toml"))
    assert "not TOML" in message
    assert "line 2" in message


@pytest.mark.parametrize("value", ["2024-13-45", "0b_", "2024-01-01 99:00:00"])
def test_values_that_yaml_takes_for_what_they_are_not(tmp_path: Path, value: str) -> None:
    assert "put it in quotes" in str(refused(tmp_path, f"- name: {value}\n"))


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("- name: local\n  id: a\n  name: other\n", 3, "name"),
        ("- name: local\n  config:\n    timeout_ms: 1\n    workdir: /\n    timeout_ms: 2\n", 5, "timeout_ms"),
        ("entries: []\nentries: []\n", 2, "entries"),
    ],
)
def test_a_key_that_is_there_twice(tmp_path: Path, text: str, line: int, key: str) -> None:
    """YAML parsers take the last one without a word."""
    error = refused(tmp_path, text)
    assert f"line {line}: the key {key!r} is there twice" in str(error)
    assert error.key == key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a list of entries, found nothing"),
        ("~", "expected a list of entries, found nothing"),
        (SECRET, "expected a list of entries, found a value of type str"),
        ("7", "found a value of type int"),
        ("{}", "the key 'entries' is missing"),
        ("entries: ~", "expected a list of entries, found nothing"),
        (f"entries: {{entries: [{SECRET}]}}", "found a value of type dict"),
        (f"- {SECRET}", "entry 1: expected a mapping with id, name and config, found a value of type str"),
        (f"- name: local\n- [[{SECRET}]]", "entry 2: expected a mapping"),
        ("- ~", "entry 1: expected a mapping with id, name and config, found nothing"),
        ("- {}", "entry 1: the key 'name' is missing"),
        ("- id: mine", "entry 1 ('mine'): the key 'name' is missing"),
        ("- name: ''", "name must be a string that is not empty, not an empty one"),
        (f"- name: [{SECRET}]", "name must be a string that is not empty, not a value of type list"),
        ("- {name: local, id: 7}", "id must be a string that is not empty, not a value of type int"),
        ("- {name: local, id: ~}", "id must be a string that is not empty, not nothing"),
        (
            f"- {{name: local, config: {SECRET}}}",
            "config must be a mapping of options, not a value of type str",
        ),
        (f"- {{name: local, config: [{SECRET}]}}", "not a value of type list"),
        (
            "- {name: local, config: {7: 8}}",
            "the names of options are strings, and one is a value of type int",
        ),
    ],
)
def test_wrong_shapes(tmp_path: Path, text: str, says: str) -> None:
    assert says in str(refused(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "key", "suggestion"),
    [
        ("- {name: local, confg: {}}", "confg", "config"),
        ("- {nam: local}", "nam", "name"),
        ("- {name: local, Config: {}}", "Config", "config"),
        ("- {name: local, timeout_ms: 5}", "timeout_ms", None),
        ("entrys: []", "entrys", "entries"),
        ("- {name: local, 7: 8}", "7", None),
    ],
)
def test_unknown_keys(tmp_path: Path, text: str, key: str, suggestion: str | None) -> None:
    error = refused(tmp_path, text)
    assert (error.key, error.suggestion) == (key, suggestion)
    assert f"unknown key {key!r}" in str(error)
    if suggestion is not None:
        assert f"did you mean {suggestion!r}?" in str(error)


def test_an_entry_that_is_in_no_list(tmp_path: Path) -> None:
    error = refused(tmp_path, "name: local\nconfig: {}\n")
    assert "found one entry that is in no list" in str(error)
    assert error.remedy is not None
    assert "'- '" in error.remedy


@pytest.mark.parametrize(
    "text",
    ["- {id: a, name: x}\n- {id: a, name: y}", "- name: a\n- name: a", "- name: a\n- {id: a, name: b}"],
)
def test_ids_are_unique(tmp_path: Path, text: str) -> None:
    error = refused(tmp_path, text)
    assert "entry 2: there is another entry with the id 'a'" in str(error)
    assert (error.entry, error.key) == ("a", "id")


def test_aliases_that_are_exponentially_many(tmp_path: Path) -> None:
    lines = ["x0: &a0 [1, 1]"]
    lines += [f"x{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    error = refused(tmp_path, "\n".join(lines))
    assert "unknown key 'x0'" in str(error)
    refused(tmp_path, "- &a [*a]")
    assert load_config(written(tmp_path, "- {name: local, config: &c {env: *c}}"))[0].name == "local"


# --- anything at all


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(
            st.sampled_from(["id", "name", "config", "entries"]) | st.text() | st.integers() | st.none(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(anything)
def test_anything_is_entries_or_an_error(data: object) -> None:
    try:
        entries = parse_entries(data, source="the data")
    except ConfigError as error:
        message = str(error)
    else:
        message = "the data are fine"
        assert all(entry.id and entry.name for entry in entries)
        assert len({entry.id for entry in entries}) == len(entries)
    assert message.startswith("the data")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode), st.sampled_from([".yaml", ".toml"]))
def test_any_file_is_entries_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(data)
    try:
        load_config(path)
    except ConfigError as error:
        message = str(error)
    else:
        message = f"configuration {path} is fine"
    assert message.startswith(f"configuration {path}")
