"""yeoul pull: the list, a model that is there already, and what cannot be pulled. Downloads: tests/weights."""

import json

from cli_kit import inline, refuses

from yeoul.weights.catalogue import find_model


def test_the_list_names_models_and_where_they_are(tmp_path):
    done = inline("pull")
    assert done.returncode == 0 and done.stderr == ""
    assert "smollm2-135m" in done.stdout and str(find_model("smollm2-135m")) in done.stdout and "MB" in done.stdout
    elsewhere = inline("pull", "--json", YEOUL_HOME=str(tmp_path))
    (model,) = json.loads(elsewhere.stdout)["models"]
    assert model["name"] == "smollm2-135m" and model["path"] is None and model["size"] > 50e6


def test_a_model_that_is_there_is_printed_at_once():
    path = str(find_model("smollm2-135m"))
    done = inline("pull", "smollm2-135m")
    assert done.returncode == 0 and done.stdout == path + "\n"
    assert done.stderr.startswith("smollm2-135m: ") and done.stderr.endswith(" of 98 MB\n")
    assert json.loads(inline("pull", "smollm2-135m", "--json").stdout) == {"name": "smollm2-135m", "path": path}


def test_what_cannot_be_pulled_is_one_line(tmp_path):
    refuses(inline("pull", "gpt-5"), 1, "no model 'gpt-5'", hint="smollm2-135m")
    file = tmp_path / "file"
    file.write_text("")
    refuses(inline("pull", "smollm2-135m", YEOUL_HOME=str(file)), 1, "directory", hint="YEOUL_HOME")
