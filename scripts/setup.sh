#!/usr/bin/env bash
# Installs what the build needs, on Debian 12 or Ubuntu 24.04: the only list of packages in the repository.
#   scripts/setup.sh          library, command, tests, benchmarks
#   scripts/setup.sh --python also what `pip install .` and `make python` need; PyPI packages are in pyproject.toml
#   scripts/setup.sh --dev    also what the checks of .ci/run need
# Asks apt only when something is missing, so that it works offline from the second time on.
set -euo pipefail

packages=(
  build-essential cmake ninja-build  # toolchain
  libdnnl-dev                        # host GEMM tiles (oneDNN)
  libfmt-dev                         # text, library and command
  libcli11-dev nlohmann-json3-dev    # command
  libgtest-dev libbenchmark-dev      # tests and benchmarks
)
case "${1:-}" in
  --python) packages+=(python3 python3-venv python3-dev) ;;
  --dev) packages+=(python3 python3-venv python3-dev clang-format git) ;;
esac

installed() {
  # dpkg knows what apt put there; a toolchain that came another way counts as well.
  case "$1" in
    clang-format) command -v clang-format-14 || command -v clang-format ;;
    cmake | python3 | git) command -v "$1" ;;
    ninja-build) command -v ninja ;;
    python3-venv) python3 -c 'import ensurepip, venv' ;;
    python3-dev) [[ -f "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ]] ;;
    *) [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]] ;;
  esac >/dev/null 2>&1
}

missing=()
for package in "${packages[@]}"; do
  installed "$package" || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "setup: no apt-get here; install what corresponds to: ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [[ $EUID -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "setup: neither root nor sudo; ask an administrator to run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
apt() {  # quiet when it works, everything when it does not
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 "$@" >"$log" 2>&1 </dev/null ||
    { cat "$log" >&2; echo "setup: apt-get $1 failed; packages needed: ${missing[*]}" >&2; exit 1; }
}
apt update
apt install -y --no-install-recommends "${missing[@]}"
