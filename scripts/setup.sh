#!/bin/sh
# Sets up .venv for pooled-mlx. Usage: sh scripts/setup.sh [runtime|dev]
#
# Safe to run again: a stamp in .venv remembers what was installed, so a second run does nothing.
# PYTHON=/path/to/python chooses the interpreter (3.11 to 3.14); VENV=dir another folder than .venv.
set -eu

kind="${1:-runtime}"
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
venv="${VENV:-.venv}"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

is_supported() { # does this interpreter run, and is it 3.11 to 3.14?
  "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14)))' >/dev/null 2>&1
}

is_root_debian() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

apt_install() { # quiet; tries once more after an index update
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$1" >/dev/null 2>&1 && return 0
  apt-get update -q >/dev/null 2>&1 || true
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$1" >/dev/null 2>&1
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    is_supported "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11 to 3.14"
    printf '%s\n' "$PYTHON"
    return
  fi
  for name in python3 python3.13 python3.12 python3.11 python3.14 python \
    /opt/homebrew/bin/python3.13 /opt/homebrew/bin/python3.12 /opt/homebrew/bin/python3.11 /opt/homebrew/bin/python3.14; do
    if command -v "$name" >/dev/null 2>&1 && is_supported "$name"; then
      printf '%s\n' "$name"
      return
    fi
  done
  case "$(uname -s)" in
    Darwin) die "no Python 3.11 to 3.14 found (Apple's own is older). Install one: brew install python@3.13" ;;
    *) die "no Python 3.11 to 3.14 found. Install one (Debian: apt-get install python3 python3-venv) or set PYTHON=/path/to/python" ;;
  esac
}

make_venv() {
  python=$(find_python)
  say "creating $venv with $("$python" --version 2>&1) ($(command -v "$python"))"
  if "$python" -m venv "$venv" >/dev/null 2>&1; then return; fi
  # Debian ships Python without ensurepip: each way on from here gives the environment its pip.
  if is_root_debian; then
    say "this Python has no ensurepip: installing python3-venv with apt-get"
    rm -rf "$venv"
    if apt_install python3-venv && "$python" -m venv "$venv" >/dev/null 2>&1; then return; fi
  fi
  rm -rf "$venv"
  if "$python" -m pip --version >/dev/null 2>&1 && "$python" -m venv --without-pip "$venv" >/dev/null 2>&1; then
    say "this Python has no ensurepip: installing pip into $venv with its own pip"
    if "$python" -m pip --python "$venv/bin/python" install -q pip; then return; fi
  fi
  rm -rf "$venv"
  if command -v uv >/dev/null 2>&1; then
    say "this Python has no ensurepip: using uv"
    uv venv -q --seed --python "$python" "$venv" && return
  fi
  rm -rf "$venv"
  die "cannot create a virtual environment: this Python lacks ensurepip. Debian and Ubuntu: apt-get install python3-venv"
}

# A fast BLAS makes float32 matrix products 30 times faster on Linux CPUs; the product loads it where it is present.
setup_blas() {
  [ "$(uname -s)" = Linux ] || return 0
  "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' >/dev/null 2>&1 && return 0
  if is_root_debian; then
    say "installing libopenblas0-pthread with apt-get (fast matrix products on the CPU)"
    apt_install libopenblas0-pthread && return 0
  fi
  say "slow without OpenBLAS. For a 30 times faster CPU backend: sudo apt-get install libopenblas0-pthread"
}

if [ -e "$venv" ] && ! is_supported "$venv/bin/python"; then
  [ -e "$venv/pyvenv.cfg" ] || die "$venv exists and is no virtual environment: move it away"
  say "$venv has no working Python 3.11 to 3.14 any more: making it anew"
  rm -rf "$venv"
fi
[ -e "$venv" ] || make_venv

case "$kind" in
  runtime) target="." ;;
  dev) target=".[dev]" ;;
  *) die "unknown set-up '$kind': runtime or dev" ;;
esac

# The stamp holds everything that decides what is installed.
want="$("$venv/bin/python" --version) $root $(cat pyproject.toml constraints.txt pooled_mlx/__init__.py | cksum)"
for done_kind in "$kind" dev; do
  if [ -f "$venv/pooled-mlx-$done_kind" ] && [ "$(cat "$venv/pooled-mlx-$done_kind")" = "$want" ]; then exit 0; fi
done

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null 2>&1 || true
say "installing pooled-mlx ($kind) into $venv; the first time takes a minute or two"
if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --constraint constraints.txt --editable "$target"
elif command -v uv >/dev/null 2>&1; then
  uv pip install -q --python "$venv/bin/python" --constraint constraints.txt --editable "$target"
else
  die "$venv has no pip and there is no uv: delete $venv and run again"
fi
setup_blas
printf '%s' "$want" >"$venv/pooled-mlx-$kind"
say "ready"
