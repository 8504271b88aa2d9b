"""The disk cache: whole files, facts that survive damage, a place that fails, a bound that removes the right entries
first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tracefuse.build import cache, cache_folders
from tracefuse.build.cache import clear, entries, read_json, size_limit, trim, write_json
from tracefuse.build.cache_folders import cache_directory, version_name, versioned
from tracefuse.build.modules import load
from tracefuse.cli.command import main
from tracefuse.errors import BuildError, OptionError

NOW_S = 1_000_000.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry(version: Path, name: str, nbytes: int, age_s: float) -> Path:
    """A folder of machine code as Triton leaves it, last used `age_s` before `NOW_S`."""
    folder = version / "machine" / name
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(b"x" * nbytes)
    os.utime(folder, (NOW_S - age_s, NOW_S - age_s))
    return folder


def test_the_default_place_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRACEFUSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_directory() == tmp_path / "tracefuse"


def test_another_version_of_triton_or_torch_or_another_gpu_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folders, "software", cache_folders.software.__wrapped__)  # a process asks once
    found = [versioned("NVIDIA H100 80GB HBM3"), versioned("NVIDIA H200")]
    monkeypatch.setattr("torch.__version__", "9.9.9")
    found.append(versioned("NVIDIA H200"))
    monkeypatch.setattr(cache_folders, "version", lambda name: "8.8.8")
    found.append(versioned("NVIDIA H200"))
    assert len(set(found)) == 4
    assert found[-1].name == "triton-8.8.8_torch-9.9.9_NVIDIA-H200"


def test_a_fact_is_read_back_and_an_unknown_key_is_none() -> None:
    write_json("tuning abc", {"num_warps": 8, "blocks": {"COLUMNS": 1024}})
    assert read_json("tuning abc") == {"num_warps": 8, "blocks": {"COLUMNS": 1024}}
    assert read_json("tuning abd") is None


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[1, 2]", b"\xff\xfe", b'{"key": "another", "value": 1}', b'{"value": 1}']
)
def test_a_damaged_fact_is_said_removed_and_found_again(damage: bytes) -> None:
    write_json("key", 1)
    (one,) = entries()
    one.path.write_bytes(damage)
    with pytest.warns(UserWarning, match="is damaged: it is removed"):
        assert read_json("key") is None
    assert entries() == []
    write_json("key", 2)
    assert read_json("key") == 2


def test_a_reader_never_sees_half_a_fact() -> None:
    values = [str(number) * 50_000 for number in range(4)]
    write_json("key", values[0])
    stop = threading.Event()

    def write_all() -> None:
        while not stop.is_set():
            for value in values:
                write_json("key", value)

    thread = threading.Thread(target=write_all)
    thread.start()
    try:
        assert all(read_json("key") in values for _ in range(200))
    finally:
        stop.set()
        thread.join()
    assert [one.kind for one in entries()] == ["facts"]  # no temporary file is left


# --- a place where nothing can be kept --------------------------------------------------------------------------------


def a_file(place: Path) -> str:
    place.write_text("")
    return f"{place} is a file, no folder: set"


def a_stray_file(place: Path) -> str:
    versioned()  # made out to be usable before the file comes, as an earlier session leaves it
    cache_folders._in_use.cache_clear()
    (place / version_name()).mkdir(parents=True)
    (place / version_name() / "modules").write_text("")
    return f"{place / version_name() / 'modules'} is a file, no folder: remove it, or set"


def below_what_the_system_guards(place: Path) -> str:
    place.symlink_to("/proc/no-such-folder")
    return f"nothing can be kept in {place}: {place} cannot be written"


def session(place: Path) -> None:
    write_json("key", 1)
    assert load(f"value = 7  # {place}\n").value == 7
    assert read_json("key") == 1


@pytest.mark.parametrize("obstacle", [a_file, a_stray_file, below_what_the_system_guards])
def test_where_nothing_can_be_kept_a_session_works_from_a_temporary_folder(
    obstacle: Callable[[Path], str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = obstacle(place)
    with pytest.warns(UserWarning, match=re.escape(problem)) as said:
        session(place)
    assert [str(one.message).endswith("set TRACEFUSE_CACHE to a folder that can be written") for one in said] == [True]
    assert place not in cache_directory().parents
    assert main(["cache"]) == 1
    shown = capsys.readouterr()
    assert problem in shown.err
    assert "of at most" not in shown.out


def test_a_place_that_fails_later_is_named(place: Path) -> None:
    write_json("key", 1)
    cache.remove(versioned() / "facts")
    (versioned() / "facts").write_text("")
    with pytest.raises(BuildError, match="set TRACEFUSE_CACHE to a folder that can be written"):
        write_json("key", 1)


def test_the_temporary_folder_goes_with_the_session(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = "import tracefuse.build.cache as c; c.write_json('key', 1); print(c.cache_directory())"
    environment = os.environ | {"TRACEFUSE_CACHE": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == tmp_path
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_not_even_a_temporary_folder(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_file(place)
    monkeypatch.setattr(cache_folders, "_temporary", cache_folders._temporary.__wrapped__)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with (
        pytest.warns(UserWarning, match="is a file"),
        pytest.raises(BuildError, match="set TRACEFUSE_CACHE or TMPDIR to a folder that can be written"),
    ):
        write_json("key", 1)


def test_clearing_takes_away_what_is_in_the_way(place: Path) -> None:
    a_stray_file(place)
    assert main(["cache", "--clear"]) == 0
    assert main(["cache"]) == 0


def test_looking_makes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert "nothing is kept yet" in capsys.readouterr().out
    assert not place.exists()


# --- the bound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1000", 1000), ("2k", 2048), ("500M", 500 << 20), ("1.5 GiB", 3 << 29), ("2 GB", 2 * 10**9), ("", 1 << 30)],
)
def test_sizes(text: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFUSE_CACHE_SIZE", text)
    assert size_limit() == nbytes


def test_what_is_no_size_is_refused_by_the_command_and_costs_a_run_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACEFUSE_CACHE_SIZE", "much")
    problem = r"TRACEFUSE_CACHE_SIZE=much is no size: .* such as 2G"
    with pytest.raises(OptionError, match=problem):
        size_limit()
    assert main(["cache"]) == 2
    assert "TRACEFUSE_CACHE_SIZE=much is no size" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=f"may take 1G, as {problem}") as said:
        [cache.write_module("one", "value = 1") for _ in range(2)]
    assert trim() == 0
    assert len(said) == 1


def test_a_session_that_builds_nothing_keeps_the_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFUSE_CACHE_SIZE", "1500")
    old = entry(versioned(), "A", 1000, 0)  # NOW_S is long ago
    cache.write_module("one", "#" * 1000)
    assert not old.exists()


def test_what_cannot_be_removed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFUSE_CACHE_SIZE", "1000")
    guarded, other = entry(versioned(), "A", 1000, 2000), entry(versioned(), "B", 1000, 1000)
    rename = os.replace

    def replace(path: Path, new: Path) -> None:
        if path == guarded:
            raise PermissionError(13, "Permission denied")
        rename(path, new)

    monkeypatch.setattr("os.replace", replace)
    with pytest.warns(UserWarning, match=r"cannot be removed \(Permission denied\): remove it by hand"):
        assert trim(NOW_S) == 1000
    assert not other.exists()


def test_stale_versions_go_first_then_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFUSE_CACHE_SIZE", "2500")
    stale = versioned().with_name("triton-1.0_torch-1.0_NVIDIA-A100")
    young_but_stale, old = entry(stale, "A", 1000, 1000), entry(versioned(), "B", 1000, 9000)
    older, recent = entry(versioned("other GPU"), "C", 1000, 9500), entry(versioned(), "D", 1000, 800)
    assert trim(NOW_S) == 2000
    assert [p.exists() for p in (young_but_stale, older, old, recent)] == [False, False, True, True]
    assert trim(NOW_S) == 0


def test_what_may_be_in_use_stays_even_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFUSE_CACHE_SIZE", "1")
    used = entry(versioned(), "A", 1000, cache.GRACE_S - 1)
    assert trim(NOW_S) == 0
    assert used.exists()


def test_clearing_leaves_what_is_not_ours(place: Path) -> None:
    write_json("key", 1)
    (place / "notes.txt").write_text("mine")
    assert clear() > 0
    assert [p.name for p in place.iterdir()] == ["notes.txt"]


def test_the_command_shows_and_clears(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    entry(versioned(), "A", 3000, 0)
    entry(versioned().with_name("triton-1.0_torch-1.0_NVIDIA-A100"), "B", 2048, 0)
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert str(place) in shown
    assert "4.93 KiB of at most 1 GiB" in shown
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith("triton-")}
    assert "2 KiB" in rows["triton-1.0_torch-1.0_NVIDIA-A100"]
    assert "in use" in rows[versioned().name]
    assert main(["cache", "--clear"]) == 0
    assert "removed 4.93 KiB" in capsys.readouterr().out
    assert entries() == []
