"""Options that name an output: nothing but files is replaced, and a path that cannot be written is refused."""

import os
import stat
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.cli.arguments import output_file, output_folder
from dist_mem.cli.commands.data import builder_parser
from dist_mem.cli.parser import build_parser
from dist_mem.datasets.recipes import builder_names
from tests.support.evaluated_runs import MEMORIES, make_run
from tests.support.messages import refused

PARSERS = {**build_parser()[1], **{f"data build {name}": builder_parser(name) for name in builder_names()}}


def test_every_option_that_names_an_output_refuses_an_empty_path() -> None:
    """One with the type of a path to read is found by tests/cli/test_refusals.py."""
    types = [action.type for parser in PARSERS.values() for action in parser._actions]
    assert {output_file, output_folder} < set(types)
    for type_of in (output_file, output_folder):
        with refused(ArgumentTypeError, "'' is no path"):
            type_of("")


def test_what_is_no_file_is_refused_and_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("old")
    (tmp_path / "link").symlink_to("page")
    (tmp_path / "nowhere").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    assert output_file(str(tmp_path / "link")) == tmp_path / "page"
    assert output_file(str(tmp_path / "nowhere")) == tmp_path / "new"
    assert output_file(str(tmp_path / "pipe")) == tmp_path / "pipe"
    with refused(ArgumentTypeError, tmp_path, "is a folder"):
        output_file(str(tmp_path))
    with refused(ArgumentTypeError, tmp_path / "page", "is no folder"):
        output_folder(str(tmp_path / "page"))
    for type_of in (output_file, output_folder):
        with refused(ArgumentTypeError, tmp_path / "page"):
            type_of(str(tmp_path / "page" / "new" / "a.json"))


def test_a_report_to_a_device_leaves_the_device(
    library: Path, tmp_path: Path, single_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run(tmp_path, library, MEMORIES["none"])
    (run / "config.yaml").write_text("tracking: {mlflow: false}\n")
    target, link = tmp_path / "null", tmp_path / "link"
    if os.getuid() == 0:
        os.mknod(target, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
    else:
        os.mkfifo(target)
    kind = stat.S_IFMT(target.lstat().st_mode)
    link.symlink_to(target)
    for path in (target, link):
        code = main(["report", str(run), "--book", "doc4", "--split", "test", "-o", str(path)])
        assert code == (0 if kind == stat.S_IFCHR else 2), capsys.readouterr().err
        assert stat.S_IFMT(target.lstat().st_mode) == kind and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "null", "run"]
