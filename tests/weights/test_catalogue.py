"""The catalogue's data, and find_model."""

import re

import pytest

from yeoul.errors import ModelFileError
from yeoul.weights.catalogue import CATALOGUE, find_model, models_folder, offered


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("YEOUL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def pulled(name):
    path = models_folder() / CATALOGUE[name].filename
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"model")
    return path


def test_entries_are_well_formed():
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert re.fullmatch(r"[\w.-]+\.gguf", entry.filename)
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", package) for package in entry.packages)
    assert len({entry.filename for entry in CATALOGUE.values()}) == len(CATALOGUE)


def test_one_model_is_offered():
    assert [entry.name for entry in offered()] == ["smollm2-135m"]


def test_a_path_to_a_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    assert find_model(path) == path
    assert find_model(str(path)) == path
    assert find_model("m.gguf").samefile(path)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_name_that_was_pulled(name, home):
    path = pulled(name)
    assert path.parent == home / "models"
    assert find_model(name) == path


def test_a_folder_of_the_same_name_is_in_nobodys_way(tmp_path):
    path = pulled("smollm2-135m")
    (tmp_path / "smollm2-135m").mkdir()
    assert find_model("smollm2-135m") == path


def test_a_partial_file_is_not_a_model():
    path = pulled("smollm2-135m")
    path.rename(path.with_name(path.name + ".partial"))
    with pytest.raises(ModelFileError):
        find_model("smollm2-135m")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("smollm2-135m", "not on this machine", "yeoul pull smollm2-135m"),
        ("gemma3-270m", "not on this machine", "bench/fetch_models.py gemma3-270m"),
        ("smolm2-135m", "unknown model 'smolm2-135m'", "did you mean smollm2-135m?"),
        ("no-such-thing", "unknown model", "smollm2-135m"),
        ("here/none.gguf", "here/none.gguf: no such file", "check the path"),
        ("none.gguf", "no such file", "check the path"),
        ("none.gguf/x", "no such file", "check the path"),
        ("", "no model is named", "smollm2-135m"),
        (".", "a directory", ".gguf"),
        ("x" * 5000, "name too long", "check the path"),
        ("a\0b", "unknown model", "smollm2-135m"),
    ],
)
def test_what_is_not_there(name, message, hint):
    with pytest.raises(ModelFileError, match=re.compile(re.escape(message), re.IGNORECASE)) as caught:
        find_model(name)
    assert hint in caught.value.hint
