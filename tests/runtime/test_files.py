"""Files and folders are replaced whole, nothing else is, and what a killed process leaves goes with the next."""

import os
import pickle
import random
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_mem.errors import EXIT_USAGE, run_error
from dist_mem.runtime import files
from dist_mem.runtime.files import (
    WrongFileError,
    by_name,
    is_missing,
    new_folder,
    open_regular,
    partial_of,
    read_regular,
    replacing,
    write_text,
)
from tests.support.faults import PLACES
from tests.support.messages import refused


def write_half_a_file(folder: Path) -> None:
    with replacing(folder / "page.html") as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def write_half_a_folder(folder: Path) -> None:
    with new_folder(folder / "model") as partial:
        write_text(partial / "weights", "half")
        os.kill(os.getpid(), signal.SIGKILL)


def in_killed_process(write: Callable[[Path], None], folder: Path) -> None:
    child = os.fork()
    if child == 0:
        write(folder)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    files._searched.clear()  # as in a new process


@pytest.mark.parametrize("write", [write_half_a_file, write_half_a_folder])
def test_the_next_start_removes_what_a_killed_one_has_left(tmp_path: Path, write: Callable[[Path], None]) -> None:
    in_killed_process(write, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    in_killed_process(write, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "of the second process"
    write_text(tmp_path / "page.html", "whole")
    with new_folder(tmp_path / "model") as partial:
        write_text(partial / "weights", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "page.html"]
    assert (tmp_path / "model" / "weights").read_text() == (tmp_path / "page.html").read_text() == "whole"


def test_what_others_may_still_write_or_have_named_stays(tmp_path: Path) -> None:
    here = partial_of(tmp_path / "a").name.split(".")[2].partition("-")[0]
    kept = [f".a.{here}-{os.getppid()}.partial", ".a.000000-1.partial", "a.1.partial", ".a.partial", "notes.partial"]
    for name in kept:
        (tmp_path / name).touch()
    (tmp_path / ".old.000000-1.partial").touch()
    os.utime(tmp_path / ".old.000000-1.partial", (0, 0))
    files._searched.clear()
    write_text(tmp_path / "a", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "a"])


def test_a_pipe_and_a_device_are_written_to(tmp_path: Path) -> None:
    pipe, device = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    with refused(FileExistsError, pipe, "nobody reads"):
        write_text(pipe, "a page")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "a page")
    assert os.read(reader, 100) == b"a page"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    if os.getuid() == 0:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
        write_text(device, "a page")
        assert stat.S_ISCHR(device.lstat().st_mode)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_and_a_socket_are_refused_and_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    server.close()
    for name in ("folder", "socket"):
        with pytest.raises(FileExistsError, match=f"is a {name}"):
            write_text(tmp_path / name, "a page")
    (tmp_path / "others").write_text("theirs")
    (tmp_path / "link").symlink_to(tmp_path / "others")
    write_text(tmp_path / "link", "a page")
    assert (tmp_path / "others").read_text() == "theirs" and not (tmp_path / "link").is_symlink()


# The one door


def test_only_a_regular_file_is_opened_and_nothing_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert read_regular(path) == read_regular(path, inside=tmp_path) == b"content"
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", inside=tmp_path) == b"content"
    with open_regular(path, "ab") as file:
        file.write(b" and more")
    with by_name(path) as name:
        assert Path(name).read_bytes() == b"content and more"
    for damage in PLACES:
        if damage.__name__ == "as_link_out":
            continue
        wrong = tmp_path / damage.__name__
        wrong.touch()
        damage(wrong, random.Random())
        for mode in ("rb", "ab"):
            if (mode, damage.__name__) == ("ab", "as_link_to_nothing"):  # it makes the file
                continue
            with refused(WrongFileError, wrong):
                open_regular(wrong, mode)
        assert not is_missing(wrong)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")
    assert is_missing(tmp_path / "none")
    with refused(WrongFileError, path / "below"):
        read_regular(path / "below")


def test_a_link_out_of_a_folder_is_refused_where_it_matters(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("theirs")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to("../secret")
    (folder / "inside").symlink_to("../folder")
    assert read_regular(folder / "link") == b"theirs"
    for path in (folder / "link", folder / "inside" / "link"):
        with refused(WrongFileError, path, folder):
            read_regular(path, inside=folder)


def test_an_error_of_a_wrong_file_is_of_the_user_and_keeps_its_reason_on_other_ranks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WrongFileError) as raised:
        read_regular(tmp_path / "pipe")
    sent = pickle.loads(pickle.dumps(raised.value))
    assert str(sent) == str(raised.value) and run_error(sent).exit_code == EXIT_USAGE
