"""Libraries that are looked up while running, from the source file alone: the one in the process, or words."""

import ctypes
import subprocess

import pytest

from tests.lint.source import ROOT

UNSUPPORTED = 5  # AM_ERR_UNSUPPORTED, a NotImplementedError


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """am_dl.c in a folder two below another, as an extension in its package is."""
    folder = tmp_path_factory.mktemp("site") / "package"
    folder.mkdir()
    sources = [ROOT / "csrc/core/am_dl.c", ROOT / "csrc/core/am_status.c"]
    command = ["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", *map(str, sources), "-o", str(folder / "core.so")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "core.so"))
    library.am_last_error.restype = ctypes.c_char_p
    library.folder = folder.parent
    return library


def opened(core, name):
    handle = ctypes.c_void_p()
    return core.am_dl_open(ctypes.byref(handle), name, b"wheel/lib", b"'some-package>=1'"), handle


def test_a_loaded_library_and_its_functions(core):
    status, handle = opened(core, b"libc.so.6")
    assert status == 0 and handle.value == ctypes.CDLL("libc.so.6")._handle
    function = ctypes.c_void_p()
    assert core.am_dl_find(ctypes.byref(function), handle, b"strlen") == 0 and function.value
    assert core.am_dl_find(ctypes.byref(function), handle, b"no_such_function") != 0
    assert core.am_last_error().startswith(b"no_such_function was not found") and b"too old" in core.am_last_error()


def test_a_library_beside_the_package(core, tmp_path):
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    (core.folder / "wheel/lib").mkdir(parents=True)
    target = core.folder / "wheel/lib/libfor_this_test.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    status, handle = opened(core, b"libfor_this_test.so.1")
    function = ctypes.c_void_p()
    assert status == 0 and core.am_dl_find(ctypes.byref(function), handle, b"one") == 0
    assert ctypes.CFUNCTYPE(ctypes.c_int)(function.value)() == 1


def test_a_missing_library_is_said_in_words(core):
    status, _ = opened(core, b"libsuch_is_not_there.so.13")
    text = core.am_last_error().decode()
    assert status == UNSUPPORTED and text.startswith("libsuch_is_not_there.so.13 was not found (")
    assert text.endswith("pip install 'some-package>=1'")
