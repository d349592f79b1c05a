"""Base images for a machine that reaches no image registry, made from what is installed on it.

`stand_ins.py PYTHON_TAG NATS_TAG` makes two images:

- in place of `python:3.11-slim-bookworm`, the machine's own Debian packages (those that such an image has, apt among
  them) and this Python, moved to /usr/local as there;
- in place of `nats:alpine`, a static busybox and the nats-server of .venv.

They are for tests: what is built from them has the machine's certificates and package index.
Needs root, Debian, a Python 3.11 outside /usr, and Docker. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
DPKG = Path("/var/lib/dpkg")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
LIMIT_S = 300.0

SEEDS = (
    "apt ca-certificates netbase tzdata passwd libbz2-1.0 libexpat1 libffi8 liblzma5 libncursesw6 libreadline8 "
    "libsqlite3-0 libssl3 libstdc++6 libuuid1 zlib1g"
).split()
"""What the Python image has besides Debian's required packages."""

LEFT_OUT = re.compile(r"^/usr/share/(doc|man|locale|info|lintian)/")
EXTRA = (
    "/etc/apt/sources.list.d",
    "/etc/apt/trusted.gpg.d",
    "/etc/ca-certificates.conf",
    "/etc/ld.so.conf",
    "/etc/nsswitch.conf",
    "/var/lib/dpkg/info/format",
)
EMPTY = "dev proc sys tmp run root home mnt opt srv var/tmp var/lib/apt/lists/partial var/lib/dpkg/updates".split()
EMPTY += "var/cache/apt/archives/partial var/log/apt etc/apt/apt.conf.d etc/apt/preferences.d usr/local/bin".split()
NOT_IN_PYTHON = ("site-packages", "test", "idlelib", "tkinter", "__pycache__", "config-3.11-x86_64-linux-gnu")

NATS = """\
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
COPY nats-server /usr/local/bin/nats-server
RUN mkdir -p /etc/nats /tmp && chmod 1777 /tmp
"""


def main(python_tag: str, nats_tag: str) -> None:
    if os.getuid() != 0 or not (DPKG / "status").exists() or sys.base_prefix == "/usr":
        raise SystemExit("stand-in images are made as root, on Debian, with a Python 3.11 outside /usr")
    with TemporaryDirectory(prefix="pdq-stand-in-", dir=os.environ.get("TMPDIR")) as folder:
        root = Path(folder, "root")
        system(root)
        python(root)
        load(root, python_tag)
    with TemporaryDirectory(prefix="pdq-stand-in-") as folder:
        nats(Path(folder), nats_tag)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
    return done.stdout


def system(root: Path) -> None:
    """The files of Debian packages, and a dpkg database that knows them."""
    installed = packages()
    chosen = closure(installed)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    wanted = {path for name in chosen for path in files(installed[name]) if not LEFT_OUT.match(path)}
    wanted |= {str(path) for place in (*EXTRA, "/etc/ssl/certs") for path in tree(Path(place))}
    wanted |= {path for link in alternatives(wanted) for path in link}
    listed = "\0".join(sorted(path.lstrip("/") for path in wanted if os.path.lexists(path) and path.count("/") > 1))
    copy = "tar -C / --no-recursion --null -T - -c | tar -C " + str(root) + " --keep-directory-symlink -x"
    subprocess.run(["bash", "-o", "pipefail", "-c", copy], input=listed, text=True, check=True, timeout=LIMIT_S)
    for name in EMPTY:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name in ("passwd", "group"):
        shutil.copy(root / "usr/share/base-passwd" / f"{name}.master", root / "etc" / name)
    run("chroot", root, "pwconv")
    for name in ("available", "diversions", "statoverride"):
        (root / "var/lib/dpkg" / name).touch()
    (root / "var/lib/dpkg/status").write_text("".join(f"{installed[name]}\n\n" for name in chosen), "utf-8")
    run("chroot", root, "ldconfig")


def packages() -> dict[str, str]:
    """Stanzas of the installed packages, by name."""
    stanzas = (DPKG / "status").read_text("utf-8").split("\n\n")
    return {field(one, "Package"): one.strip() for one in stanzas if field(one, "Status").endswith(" installed")}


def field(stanza: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", stanza, re.MULTILINE)
    return found.group(1) if found else ""


def closure(installed: dict[str, str]) -> list[str]:
    """Required packages and SEEDS, with what they depend on, of what is installed."""
    virtual = {
        provided.split()[0]: name
        for name, stanza in installed.items()
        for provided in field(stanza, "Provides").split(",")
        if provided.strip()
    }
    base = [n for n, s in installed.items() if field(s, "Essential") == "yes" or field(s, "Priority") == "required"]
    chosen: set[str] = set()
    waiting = [*base, *SEEDS]
    while waiting:
        name = waiting.pop()
        name = name if name in installed else virtual.get(name, "")
        if not name or name in chosen:
            continue
        chosen.add(name)
        relations = f"{field(installed[name], 'Depends')},{field(installed[name], 'Pre-Depends')}"
        waiting += [re.split(r"[ (:]", one.strip())[0] for one in re.split("[,|]", relations) if one.strip()]
    return sorted(chosen)


def files(stanza: str) -> Iterator[str]:
    """A package's files, and those of dpkg about it."""
    name, architecture = field(stanza, "Package"), field(stanza, "Architecture")
    for path in (DPKG / "info").glob(f"{name}[.:]*"):
        if path.name.startswith((f"{name}.", f"{name}:{architecture}.")):
            yield str(path)
            if path.suffix == ".list":
                yield from path.read_text("utf-8").splitlines()


def alternatives(wanted: set[str]) -> Iterator[tuple[str, str]]:
    """The links of update-alternatives to programs that are there, such as awk: no package lists them."""
    for record in (DPKG / "alternatives").iterdir():
        _, link, *_ = record.read_text("utf-8").splitlines()
        own = Path("/etc/alternatives", record.name)
        if own.is_symlink() and str(own.readlink()) in wanted:
            yield str(own), link


def tree(place: Path) -> Iterable[Path]:
    return [place, *place.rglob("*")] if place.is_dir() else [place]


def python(root: Path) -> None:
    """This Python in /usr/local, with pip, the machine's certificates and its package index."""
    prefix, local = Path(sys.base_prefix), root / "usr/local"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy2(prefix / "bin" / version, local / "bin")
    for name in ("python3", "python"):
        (local / "bin" / name).symlink_to(version)
    ignore = shutil.ignore_patterns(*NOT_IN_PYTHON, "*.pyc")
    shutil.copytree(prefix / "lib" / version, local / "lib" / version, symlinks=True, ignore=ignore)
    for library in (prefix / "lib").glob("libpython3*.so*"):
        shutil.copy2(library, local / "lib", follow_symlinks=False)
    shutil.copy2(CERTIFICATES, root / str(CERTIFICATES).lstrip("/"))
    own = Path("/usr/local/share/ca-certificates")
    if own.is_dir():
        shutil.copytree(own, root / str(own).lstrip("/"), dirs_exist_ok=True)
    run("chroot", root, "ldconfig")
    run("chroot", root, "/usr/local/bin/python3", "-m", "ensurepip")
    (local / "bin" / "pip").symlink_to("pip3")


def index_variables() -> dict[str, str]:
    """Where pip and uv look in the image: as pip is configured to on this machine."""
    variables = {"PIP_CERT": str(CERTIFICATES), "SSL_CERT_FILE": str(CERTIFICATES)}
    listed = run(sys.executable, "-m", "pip", "config", "list")
    if found := re.search(r"^(?:global|install|:env:)\.index-url='(.*)'$", listed, re.MULTILINE):
        variables |= {"PIP_INDEX_URL": found.group(1), "UV_DEFAULT_INDEX": found.group(1)}
    return variables


def load(root: Path, tag: str) -> None:
    variables = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    changes = [f"ENV {name}={value}" for name, value in (variables | index_variables()).items()]
    changes.append('CMD ["python3"]')
    flags = [part for change in changes for part in ("--change", change)]
    with subprocess.Popen(["docker", "import", *flags, "-", tag], stdin=subprocess.PIPE) as importing:
        assert importing.stdin is not None
        with importing.stdin, tarfile.open(fileobj=importing.stdin, mode="w|") as archive:
            archive.add(root, arcname=".")
    if importing.returncode:
        raise SystemExit(f"docker import of {tag} failed")


def nats(folder: Path, tag: str) -> None:
    run("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", "busybox-static", cwd=folder)
    run("dpkg", "-x", next(folder.glob("busybox-static*.deb")), folder / "package")
    busybox = next((folder / "package").rglob("bin/busybox"))
    context = folder / "context"
    context.mkdir()
    shutil.copy2(busybox, context / "busybox")
    shutil.copy2(Path(sysconfig.get_path("scripts")) / "nats-server", context / "nats-server")
    (context / "Dockerfile").write_text(NATS, "utf-8")
    run("docker", "build", "--quiet", "--tag", tag, context)


if __name__ == "__main__":
    main(*sys.argv[1:])
