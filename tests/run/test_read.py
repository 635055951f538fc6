"""The reader of run files: all mistakes are reported at once, and nothing is read that was not written."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.chat.template import read_bare_template
from phalanx.data.errors import TokenizerError
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.hardware.cluster import read_toml
from phalanx.launch.topology_files import read_topology
from phalanx.model.facts.presets import PRESETS
from phalanx.run.fields import Problem, RunFileError
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import override as overridden
from phalanx.run.read import read_run, run_file_at, spec_from_table, to_table
from phalanx.run.rules import check
from phalanx.run.spec import ModelSpec, RunSpec
from run.specs import replace_at, run_specs


def problems_of(text: str, *overrides: str, folder: Path) -> dict[str, Problem]:
    path = folder / "run.toml"
    path.write_text(text)
    with pytest.raises(RunFileError) as caught:
        read_run(path, PRESETS, overrides)
    return {problem.path: problem for problem in caught.value.problems}


def read(text: str, *overrides: str, folder: Path) -> RunSpec:
    path = folder / "run.toml"
    path.write_text(text)
    return read_run(path, PRESETS, overrides)


# Valid files


def test_an_empty_file_is_the_default_run(tmp_path: Path) -> None:
    assert read("", folder=tmp_path) == RunSpec()


def test_a_set_that_would_drop_the_other_fields_of_a_table_is_refused_with_their_names(
    tmp_path: Path,
) -> None:
    text = "[train]\nsteps = 7\nbatch_size = 16"
    for override in ("train={}", "train={steps = 9}"):
        problem = problems_of(text, override, folder=tmp_path)["train"]
        assert "train.batch_size" in str(problem)
    assert read(text, "train.steps=9", folder=tmp_path).train.batch_size == 16


@given(run_specs())
@settings(max_examples=25)  # a tenth of a second each
def test_a_run_that_is_written_as_toml_reads_back_equal(spec: RunSpec) -> None:
    table = tomllib.loads(tomli_w.dumps(to_table(spec)))
    again, problems = spec_from_table(table, PRESETS)
    # A drawn run may break rules between fields; each field by itself reads back.
    assert problems == check(spec)
    assert again == (None if problems else spec)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_read_as_its_fields(name: str, tmp_path: Path) -> None:
    assert read(f'[model]\npreset = "{name}"', folder=tmp_path).model == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_preset_that_is_written_as_toml_reads_back_equal(name: str, tmp_path: Path) -> None:
    model = resolve(PRESETS[name], vocab_size=512)
    assert read(tomli_w.dumps({"model": to_table(model)}), folder=tmp_path).model == model


def test_fields_beside_a_preset_override_it(tmp_path: Path) -> None:
    model = read('[model]\npreset = "llama3-8b"\nlayers = 2\n', folder=tmp_path).model
    assert model == dataclasses.replace(PRESETS["llama3-8b"], layers=2)


def test_a_whole_number_is_read_as_a_float_where_a_float_belongs(tmp_path: Path) -> None:
    lr = read("[optimizer]\nlr = 1", folder=tmp_path).optimizer.lr
    assert lr == 1.0
    assert isinstance(lr, float)


def test_a_whole_number_may_be_written_as_a_float(tmp_path: Path) -> None:
    steps = read("[train]\nsteps = 1e6", folder=tmp_path).train.steps
    assert steps == 1_000_000
    assert isinstance(steps, int)


def test_a_single_string_is_read_as_a_list_of_one(tmp_path: Path) -> None:
    assert read('[data]\ncorpus = "a.txt"', folder=tmp_path).data.corpus == ("a.txt",)


# Overrides


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("train.steps = 70", "train", "steps", 70),
        ("runtime.compile=true", "runtime", "compile", True),
        ("parallel.sharding=zero2", "parallel", "sharding", "zero2"),
        ('parallel.sharding="zero2"', "parallel", "sharding", "zero2"),
        ("data.path=/some/folder", "data", "path", "/some/folder"),
        ('data.corpus=["a", "b"]', "data", "corpus", ("a", "b")),
        ("sample.prompt=", "sample", "prompt", ""),
        ("sample.prompt=a=b", "sample", "prompt", "a=b"),
    ],
)
def test_an_override_sets_one_field(
    override: str, section: str, name: str, value: object, tmp_path: Path
) -> None:
    spec = read("", override, folder=tmp_path)
    assert getattr(getattr(spec, section), name) == value
    assert replace_at(RunSpec(), f"{section}.{name}", value) == spec


def test_an_override_wins_over_the_file_and_a_later_one_over_an_earlier(tmp_path: Path) -> None:
    spec = read("[train]\nsteps = 50\nseq_len = 64", "train.steps=60", "train.steps=70", folder=tmp_path)
    assert (spec.train.steps, spec.train.seq_len) == (70, 64)


def test_an_override_may_name_a_preset_or_a_nested_field(tmp_path: Path) -> None:
    spec = read("", "model.preset=llama3-8b", "model.rope_scaling.factor=2", folder=tmp_path)
    assert spec.model.layers == 32
    assert spec.model.rope_scaling is not None
    assert spec.model.rope_scaling.factor == 2.0


def test_a_run_that_was_read_is_overridden_where_its_preset_is_not_known(tmp_path: Path) -> None:
    spec = read('[model]\npreset = "llama3-8b"\nlayers = 2', folder=tmp_path)
    other = overridden(spec, ["parallel.tensor=2"], tmp_path / "run.toml")
    assert other == replace_at(spec, "parallel.tensor", 2)


def test_no_line_of_an_override_is_dropped(tmp_path: Path) -> None:
    lines = '1\nname = "other"'
    assert read("", f"sample.prompt={lines}", folder=tmp_path).sample.prompt == lines
    assert (
        "not a whole number"
        in problems_of("", f"train.steps={lines}", folder=tmp_path)["train.steps"].finding
    )


def test_an_override_without_an_equals_sign_is_explained(tmp_path: Path) -> None:
    problem = problems_of("", "train.steps", folder=tmp_path)["train.steps"]
    assert "section.field=value" in problem.finding


def test_an_override_of_something_that_is_not_a_table_is_explained(tmp_path: Path) -> None:
    problem = problems_of("name = 'x'", "name.first=3", folder=tmp_path)["name.first"]
    assert "name is not a table" in problem.finding


def test_a_wrong_override_is_reported_like_a_wrong_field(tmp_path: Path) -> None:
    problem = problems_of("", "optimizer.learning_rat=1", "train.steps=0", folder=tmp_path)
    assert set(problem) == {"optimizer.learning_rat", "train.steps"}


# Refusals


def test_three_mistakes_are_reported_at_once_with_path_range_and_nearest_name(tmp_path: Path) -> None:
    text = """
    [optimizer]
    lr = -1.0
    [trian]
    steps = 3
    [parallel]
    sharding = "zero4"
    """
    problems = problems_of(text, folder=tmp_path)
    assert set(problems) == {"optimizer.lr", "trian", "parallel.sharding"}
    assert problems["optimizer.lr"].finding == "-1.0 is out of range"
    assert problems["optimizer.lr"].remedy == "must be above 0"
    assert problems["trian"].remedy == "did you mean train?"
    assert "'none', 'zero1', 'zero2', 'zero3'" in problems["parallel.sharding"].remedy
    assert "did you mean 'zero" in problems["parallel.sharding"].remedy


def test_the_message_names_the_file_and_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nsteps = 0\nseqlen = 3\n")
    with pytest.raises(RunFileError) as caught:
        read_run(path, PRESETS)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 2 problems"
    assert lines[1:] == [
        "  train.steps: 0 is out of range (must be at least 1 and at most 1e+09)",
        "  train.seqlen: there is no such field (did you mean seq_len?)",
    ]


@pytest.mark.parametrize(
    ("text", "path", "finding", "remedy"),
    [
        ("[train]\nsteps = 1.5", "train.steps", "1.5 is not a whole number", "must be a whole number"),
        ("[train]\nsteps = 1e300", "train.steps", "1e+300 is not a whole number", "must be a whole number"),
        ("[train]\nsteps = inf", "train.steps", "inf is not a whole number", "must be a whole number"),
        ("[train]\nsteps = true", "train.steps", "True is not", "a whole number"),
        ("[train]\nsteps = '9'", "train.steps", "'9' is not", "a whole number"),
        ("[optimizer]\nlr = inf", "optimizer.lr", "inf is not", "a finite number"),
        ("[optimizer]\nlr = nan", "optimizer.lr", "nan is not", "a finite number"),
        (f"[optimizer]\nlr = 1{'0' * 400}", "optimizer.lr", "is not", "a finite number"),
        ("[optimizer]\nlr = false", "optimizer.lr", "False is not", "a number"),
        ("[runtime]\ncompile = 1", "runtime.compile", "1 is not", "true or false"),
        ("name = 3", "name", "3 is not", 'a string in "quotes"'),
        ("[data]\ncorpus = 3", "data.corpus", "3 is not", "a list"),
        ("[data]\ncorpus = ['a', 3]", "data.corpus[1]", "3 is not", "a string"),
        ("train = 3", "train", "3 is not", "a table [train]"),
        ("[model]\nrope_scaling = true", "model.rope_scaling", "True is not", "a table [model.rope_scaling]"),
        (
            "[model.rope_scaling]\nfacto = 1",
            "model.rope_scaling.facto",
            "no such field",
            "did you mean factor?",
        ),
        (
            "[model.moe]\nnormalise = false",
            "model.moe.normalise",
            "no such field",
            "did you mean normalize?",
        ),
        ("[optimizer]\nbeta1 = 1.0", "optimizer.beta1", "1.0 is out of range", "at least 0 and below 1"),
        (
            "[model]\npreset = 'llama3-9b'",
            "model.preset",
            "'llama3-9b' is not known",
            "did you mean 'llama3-8b'?",
        ),
        ("[model]\npreset = 8", "model.preset", "8 is not known", "one of 'toy-4m'"),
        ("zzz = 1", "zzz", "no such field", "known here: checkpoint, data"),
        ("seed = 1", "seed", "no such field", "did you mean runtime.seed?"),
        ("[train]\nseed = 1", "train.seed", "no such field", "did you mean runtime.seed?"),
        ("[train]\ndim = 1", "train.dim", "no such field", "did you mean model.dim"),
        ("[model]\nd_model = 64", "model.d_model", "no such field", "did you mean model.dim?"),
        ("[train]\nlearning_rate = 0.1", "train.learning_rate", "no such field", "did you mean optimizer.lr"),
    ],
)
def test_a_mistake_is_explained(text: str, path: str, finding: str, remedy: str, tmp_path: Path) -> None:
    problems = problems_of(text, folder=tmp_path)
    assert set(problems) == {path}
    assert finding in problems[path].finding
    assert remedy in problems[path].remedy


def test_a_rule_is_not_reported_on_top_of_the_mistake_that_broke_it(tmp_path: Path) -> None:
    # The misread batch size falls back to its default, of which 7 slots would not be a divisor.
    assert set(problems_of("[train]\nbatch_size = 'x'\nslots = 7", folder=tmp_path)) == {"train.batch_size"}


def test_rules_between_fields_are_reported_together_with_other_mistakes(tmp_path: Path) -> None:
    problems = problems_of("[train]\nbatch_size = 32\nslots = 7\n[optimizer]\nlr = 0", folder=tmp_path)
    assert set(problems) == {"train.slots", "optimizer.lr"}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="there is no file"):
        read_run(tmp_path / "gone.toml", PRESETS)


def test_a_directory_is_not_a_run_file(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="is a directory"):
        read_run(tmp_path, PRESETS)


def test_of_a_run_directory_the_run_file_in_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(RunFileError, match=f"its run file is {tmp_path}/run.toml"):
        read_run(tmp_path, PRESETS)


def test_a_link_to_nowhere_is_named_as_such_and_not_proposed_again(tmp_path: Path) -> None:
    (tmp_path / "dangling.toml").symlink_to("nowhere")
    with pytest.raises(RunFileError, match="a link to a file that does not exist") as refused:
        read_run(tmp_path / "dangling.toml", PRESETS)
    assert "did you mean" not in str(refused.value)


def test_a_run_directory_stands_for_its_run_file(tmp_path: Path) -> None:
    assert run_file_at(tmp_path) == tmp_path
    (tmp_path / "run.toml").touch()
    assert run_file_at(tmp_path) == run_file_at(tmp_path / "run.toml") == tmp_path / "run.toml"


def test_a_path_through_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(RunFileError, match="cannot be read: Not a directory"):
        read_run(tmp_path / "run.toml" / "run.toml", PRESETS)


@pytest.mark.parametrize("data", [b"[train\nsteps = 3", b"steps = ", b"\xff\xfe\x00"])
def test_what_is_not_toml_is_explained(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(data)
    with pytest.raises(RunFileError, match="not valid TOML"):
        read_run(tmp_path / "run.toml", PRESETS)


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(
    [
        f"{section}.{name}"
        for section, table in to_table(RunSpec()).items()
        if isinstance(table, dict)
        for name in table
    ]
)


@given(st.dictionaries(fields, json_values, min_size=1, max_size=4))
@settings(max_examples=200)
def test_any_value_of_a_field_is_read_or_reported_and_never_raises(values: dict[str, object]) -> None:
    table: dict[str, Any] = {}
    for path, value in values.items():
        section, name = path.split(".")
        table.setdefault(section, {})[name] = value
    spec, problems = spec_from_table(table, PRESETS)
    assert (spec is None) == bool(problems)
    for problem in problems:
        assert problem.path
        assert problem.finding
        assert problem.remedy


def test_a_model_section_alone_can_be_written_and_read(tmp_path: Path) -> None:
    model = ModelSpec(layers=3, vocab_size=99)
    assert read(tomli_w.dumps({"model": to_table(model)}), folder=tmp_path).model == model


def test_another_data_path_leaves_the_corpus_of_the_file_behind(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\npath = "own"\ncorpus = ["python-stdlib"]\n')
    assert read_run(file, {}).data.corpus == ("python-stdlib",)
    assert read_run(file, {}, ["data.path=notes"]).data.corpus == ()
    assert read_run(file, {}, ["data.path=notes", 'data.corpus=["x.txt"]']).data.corpus == ("x.txt",)


@pytest.mark.parametrize(
    "text",
    ["x = " + "[" * 5000 + "]" * 5000, "x = " + "9" * 5000, "[train"],
    ids=["deep nesting", "a number of 5,000 digits", "no TOML"],
)
def test_a_file_that_cannot_be_parsed_is_a_problem_of_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(RunFileError, match="not valid TOML"):
        read_run(file, {})


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbfname = 'marked'\n")
    assert read_run(file, {}).name == "marked"


@pytest.mark.parametrize(
    "read_file", [partial(read_run, presets={}), read_recipe, read_toml, read_topology, read_bare_template]
)
def test_a_file_without_an_end_is_refused(read_file: Callable[[Path], object]) -> None:
    with pytest.raises((ValueError, TokenizerError), match="more than"):
        read_file(Path("/dev/zero"))


def test_a_run_file_may_come_through_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"name = 'piped'")
    os.close(writer)
    assert read_run(Path(f"/dev/fd/{reader}"), {}).name == "piped"
    os.close(reader)


def test_the_first_hundred_of_very_many_mistakes_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("".join(f"unknown{number} = 1\n" for number in range(20_000)))
    with pytest.raises(RunFileError) as caught:
        read_run(file, {})
    assert len(caught.value.problems) == 101


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "", "x" * 200, "a\nb", "a\u200db", "漢" * 70])
def test_a_name_that_is_no_folders_name_is_refused(name: str) -> None:
    spec, problems = spec_from_table({"name": name}, {})
    assert spec is None
    assert [problem.path for problem in problems] == ["name"]


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    spec, problems = spec_from_table({"fleet": {"heartbeat_s": 100, "lease_s": 1}}, {})
    assert spec is None
    assert [problem.path for problem in problems] == ["fleet.lease_s"]
    assert "at least 200" in problems[0].remedy


def test_a_model_too_deep_to_be_listed_is_refused_at_once() -> None:
    _, problems = spec_from_table({"model": {"layers": 10**9}}, {})
    assert [problem.path for problem in problems] == ["model.layers"]


def test_the_preset_may_be_a_run_directory_whose_model_it_is(tmp_path: Path) -> None:
    source = ModelSpec(layers=3, dim=48, heads=4, vocab_size=300)
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported/run.toml").write_text(tomli_w.dumps({"model": to_table(source)}))
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npreset = "{tmp_path}/imported"\nlayers = 5\n')
    assert read_run(file, PRESETS).model == dataclasses.replace(
        source, layers=5, preset=f"{tmp_path}/imported"
    )


def test_a_preset_that_is_neither_known_nor_a_run_directory_is_refused_with_both(tmp_path: Path) -> None:
    _, problems = spec_from_table({"model": {"preset": str(tmp_path)}}, PRESETS)
    assert [problem.path for problem in problems] == ["model.preset"]
    assert "llama3-8b" in problems[0].remedy
    assert "run directory" in problems[0].remedy


def test_a_value_with_a_byte_that_is_not_utf8_is_named_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(RunFileError, match=r"data\.path: .*udcff.* is not UTF-8"):
        read_run(path, PRESETS, ['data.path="corpus\udcff"'])
