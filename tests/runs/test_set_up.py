""".ci/set_up.py: an environment from a folder of wheels, by uv and by pip."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.run


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with one package, `marble` 1.0."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    facts = "marble-1.0.dist-info"
    with zipfile.ZipFile(folder / "marble-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("marble.py", "COLOUR = 'green'\n")
        wheel.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: marble\nVersion: 1.0\n")
        wheel.writestr(
            f"{facts}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{facts}/RECORD", f"marble.py,,\n{facts}/METADATA,,\n{facts}/WHEEL,,\n")
    return folder


def set_up(folder: Path, wheels: Path, uv: str | None) -> subprocess.CompletedProcess[str]:
    """Run the script with a pip that knows the folder alone, and with this text as uv's program."""
    programs = folder.parent / "programs"
    programs.mkdir()
    if uv is not None:
        (programs / "uv").write_text(uv)
        (programs / "uv").chmod(0o755)
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(folder.parent),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    script = str(ROOT / ".ci" / "set_up.py")
    return subprocess.run(
        [sys.executable, script, str(folder), "marble==1.0"],
        env=environment,
        capture_output=True,
        text=True,
    )


def colour(folder: Path) -> str:
    code = "import marble; print(marble.COLOUR)"
    return subprocess.check_output([folder / "bin" / "python", "-c", code], text=True).strip()


@pytest.mark.parametrize("uv", [None, "#!/bin/sh\nexit 1\n"], ids=["none", "fails"])
def test_pip_installs_where_uv_cannot(tmp_path, wheels, uv):
    done = set_up(tmp_path / "environment", wheels, uv)
    assert done.returncode == 0, done.stderr
    assert colour(tmp_path / "environment") == "green"


def test_uv_is_told_what_pip_is_configured_with(tmp_path, wheels):
    """A uv that notes its settings, and finds nothing in PyTorch's own index."""
    noted = tmp_path / "noted"
    done = set_up(
        tmp_path / "environment",
        wheels,
        f'#!/bin/sh\necho "$UV_FIND_LINKS ${{UV_TORCH_BACKEND-none}} $*" >> {noted}\n'
        '[ "$UV_TORCH_BACKEND" = "" ]\n',
    )
    assert done.returncode == 0, done.stderr
    tried, installed = noted.read_text().splitlines()
    assert tried.startswith(f"{wheels} auto pip install")
    assert tried.endswith("--dry-run")
    assert installed.startswith(f"{wheels} none pip install")
    assert installed.endswith("marble==1.0")


def test_nothing_to_install_is_an_error(tmp_path, wheels):
    (wheels / "marble-1.0-py3-none-any.whl").unlink()
    assert set_up(tmp_path / "environment", wheels, None).returncode != 0
