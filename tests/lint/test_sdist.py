"""What a source distribution holds."""

import subprocess
import sys
import tarfile

from .source import ROOT


def test_sdist_can_be_built_from(tmp_path):
    """setup.py compiles csrc by walking it, so that setuptools does not know of these files by itself."""
    out = ["--egg-base", tmp_path], ["--dist-dir", tmp_path / "dist"]
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", *out[0], "sdist", *out[1]], cwd=ROOT, check=True, timeout=60
    )
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    wanted = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    wanted |= {"setup.py", "pyproject.toml", "README.md", "LICENSE", "automodel_c/_amcore.pyi", "automodel_c/py.typed"}
    assert not wanted - names
